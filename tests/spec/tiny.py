"""A tiny checkpoint with the names of decoder.toml, and what loading or checking a spec against it says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from inferflow.errors import InferflowError
from inferflow.runtime.model import load_model
from inferflow.spec.library import load_spec
from inferflow.weights.check import check_spec
from inferflow.weights.open import open_source

CONFIG: dict[str, Any] = {
    "model_type": "tiny",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def tensors(config: dict[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """Seeded weights, by the names that decoder.toml expects."""
    d, ff, kv = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"]
    hd = d // config["num_attention_heads"]
    shapes = {"model.embed_tokens": (config["vocab_size"], d), "model.norm": (d,), "lm_head": (config["vocab_size"], d)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {layer + name: (d,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {layer + f"self_attn.{p}_proj": (kv * hd if p in "kv" else d, d) for p in "qkvo"}
        shapes |= {layer + f"mlp.{p}_proj": (ff, d) for p in ("gate", "up")} | {layer + "mlp.down_proj": (d, ff)}
    rng = np.random.default_rng(3)
    return {name + ".weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_checkpoint(folder: Path, config: dict[str, Any] = CONFIG, **more: Any) -> Path:
    """`folder` with config.json and model.safetensors; a tensor of `more` that is None is left out."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    stored = {**tensors(config), **more}
    save_file({name: a for name, a in stored.items() if a is not None}, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Wrong:
    """A wrong spec. ``⟦`` in `text` stands where the error must point; `says` and `fix` are parts of the message (any
    fix will do when it is empty, but there must be one). `extends` is put before the text unless it is empty. `config` and
    `stored` change the checkpoint; `lint` says that only ``spec check`` complains, for a model that could be run."""

    name: str
    text: str
    says: str
    fix: str = ""
    extends: str = 'extends = "decoder"\n'
    config: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, Any] = field(default_factory=dict)
    lint: bool = False


def load_problem(spec: Path, model: Path) -> InferflowError | None:
    """What loading says; anything but an InferflowError escapes."""
    try:
        load_model(model, spec)
    except InferflowError as error:
        return error
    return None


def check_problems(spec: Path, model: Path) -> list[InferflowError]:
    """What the linter says."""
    source = open_source(model)
    try:
        return check_spec(load_spec(spec), source.config, source)
    except InferflowError as error:
        return [error]
