"""A tiny checkpoint made with NumPy alone: the layout every shipped base knows, random weights, no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 96,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def tensors(config: dict[str, Any] = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the usual names."""
    rng = np.random.default_rng(seed)
    d, ff, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    hd = d // config["num_attention_heads"]
    heads, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, d), "model.norm": (d,), "lm_head": (vocab, d)}
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        shapes |= {
            f"{layer}.input_layernorm": (d,),
            f"{layer}.self_attn.q_proj": (heads, d),
            f"{layer}.self_attn.k_proj": (kv, d),
            f"{layer}.self_attn.v_proj": (kv, d),
            f"{layer}.self_attn.o_proj": (d, heads),
            f"{layer}.post_attention_layernorm": (d,),
            f"{layer}.mlp.gate_proj": (ff, d),
            f"{layer}.mlp.up_proj": (ff, d),
            f"{layer}.mlp.down_proj": (d, ff),
        }
    out = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape).astype(np.float32)
        out[f"{name}.weight"] = 1 + 0.2 * noise if len(shape) == 1 else noise * np.float32(shape[-1] ** -0.5)
    return out


def write(folder: Path, config: dict[str, Any] = CONFIG, weights: dict[str, np.ndarray] | None = None) -> Path:
    """The checkpoint, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config) if weights is None else weights, folder / "model.safetensors")
    return folder
