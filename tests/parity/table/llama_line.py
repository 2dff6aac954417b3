"""Dense decoders in the line of the first: RMS norms, rotary positions, gated feed-forward, and what each does otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .row import SMALL, Row, sparse

LOCAL, FULL = "sliding_attention", "full_attention"
TIED = {**SMALL, "tie_word_embeddings": True}
UNTIED = {**SMALL, "tie_word_embeddings": False}
WIDE = {**SMALL, "head_dim": 12}  # heads · head_dim is not hidden_size
DEEP = {**SMALL, "num_hidden_layers": 5}


def rope(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """Rotary parameters as transformers 5 has them."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def hub(folder: Path) -> None:
    """A rewrite of config.json to the words of transformers 4: rope_theta, and rope_scaling with a type."""
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **scaling} if kind != "default" else None
    path.write_text(json.dumps(config), "utf-8")


BANDS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
YARN_RANGE = {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.7}
YARN_MSCALE = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.3, "truncate": False}

LLAMA = [
    Row("llama", "llama", SMALL),
    Row("llama-mha-tied", "llama", {**TIED, "num_key_value_heads": 6}),
    Row("llama-mqa-odd", "llama", {**SMALL, "num_key_value_heads": 1, "intermediate_size": 57, "vocab_size": 97}),
    Row("llama-biases-headdim", "llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    Row("llama-3.1", "llama", {**SMALL, **rope("llama3", 500000.0, **BANDS)}),
    Row("llama-linear", "llama", {**SMALL, **rope("linear", factor=4.0)}),
    Row("llama-dynamic-short", "llama", {**SMALL, **rope("dynamic", factor=2.0)}),
    Row("llama-dynamic-long", "llama", {**SMALL, **rope("dynamic", factor=2.0), "max_position_embeddings": 16}),
    Row("llama-yarn", "llama", {**SMALL, **rope("yarn", **YARN)}),
    Row("llama-yarn-range", "llama", {**SMALL, **rope("yarn", **YARN_RANGE)}),
    Row("llama-yarn-mscale", "llama", {**SMALL, **rope("yarn", **YARN_MSCALE)}),
    Row("llama-hub", "llama", {**SMALL, **rope("llama3", 500000.0, **BANDS)}, rewrite=hub),
    Row(
        "llama-dynamic-hub",
        "llama",
        {**SMALL, **rope("dynamic", factor=2.0), "max_position_embeddings": 16},
        rewrite=hub,
    ),
    Row("llama-sparse", "llama", SMALL, rewrite=sparse()),
]

MISTRAL = [
    Row("mistral-window", "mistral", {**SMALL, "sliding_window": 8}),
    Row("mistral-no-window", "mistral", {**WIDE, "sliding_window": None}),
    Row("mistral-sparse", "mistral", SMALL, rewrite=sparse()),
    Row("mistral-window-1", "mistral", {**SMALL, "sliding_window": 1, "rope_parameters": {"rope_theta": 1e6}}),
]

QWEN = [
    Row("qwen2", "qwen2", {**SMALL, "sliding_window": 8, "use_sliding_window": False}),
    Row("qwen2-window", "qwen2", {**DEEP, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}),
    Row("qwen2-window-all", "qwen2", {**SMALL, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}),
    Row(
        "qwen2-layer-types", "qwen2",
        {**TIED, "sliding_window": 7, "use_sliding_window": True, "layer_types": [LOCAL, FULL, LOCAL]},
    ),
    Row("qwen2-yarn", "qwen2", {**TIED, **rope("yarn", 1e6, **YARN)}),
    Row("qwen2-yarn-hub", "qwen2", {**TIED, **rope("yarn", 1e6, **YARN_RANGE)}, rewrite=hub),
    Row("qwen2-sparse", "qwen2", SMALL, rewrite=sparse()),
    Row("qwen3", "qwen3", WIDE),
    Row("qwen3-sparse", "qwen3", {**SMALL, "head_dim": 128}, rewrite=sparse()),
    Row("qwen3-biases-tied", "qwen3", {**TIED, "head_dim": 16, "attention_bias": True}),
    Row(
        "qwen3-window", "qwen3",
        {**DEEP, "head_dim": 8, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
    ),
    Row("qwen3-yarn", "qwen3", {**WIDE, **rope("yarn", 1e6, **YARN)}),
]  # fmt: skip

SMOLLM = [
    Row("smollm3", "smollm3", {**DEEP, "tie_word_embeddings": True}),
    Row("smollm3-untied-biases", "smollm3", {**UNTIED, "attention_bias": True, "mlp_bias": True, "no_rope_layers": [0, 1, 1]}),
    Row("smollm3-interval-window", "smollm3",
        {**DEEP, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8}),
    Row("smollm3-layer-types", "smollm3",
        {**SMALL, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6,
         "layer_types": [LOCAL, FULL, FULL]}),
    Row("smollm3-sparse", "smollm3", DEEP, rewrite=sparse()),
    Row("smollm3-yarn", "smollm3", {**DEEP, **rope("yarn", 5e6, **YARN)}),
]  # fmt: skip

OTHERS = [
    Row("ernie4_5", "ernie4_5", {**TIED, "head_dim": 12}),
    Row("ernie4_5-biases-untied", "ernie4_5", {**UNTIED, "head_dim": 8, "use_bias": True}),
    Row("ernie4_5-sparse", "ernie4_5", SMALL, rewrite=sparse()),
    Row("arcee", "arcee", SMALL),
    Row("arcee-sparse", "arcee", SMALL, rewrite=sparse()),
    Row("arcee-biases-yarn", "arcee", {**SMALL, "attention_bias": True, "mlp_bias": True, **rope("yarn", **YARN)}),
    Row("seed_oss", "seed_oss", WIDE),
    Row("seed_oss-sparse", "seed_oss", SMALL, rewrite=sparse()),
    Row("seed_oss-biases", "seed_oss", {**WIDE, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    Row("seed_oss-no-biases", "seed_oss", {**TIED, "head_dim": 8, "attention_bias": False, "attention_out_bias": False}),
    Row("apertus", "apertus", SMALL),
    Row("apertus-biases-bands", "apertus", {**TIED, "attention_bias": True, **rope("llama3", 12e6, **BANDS)}),
    Row("apertus-sparse", "apertus", SMALL, rewrite=sparse()),
    Row("apertus-plain-rope", "apertus", {**SMALL, **rope("default", 5e5)}),
    Row("hunyuan", "hunyuan_v1_dense", {**SMALL, "head_dim": 8}),
    Row("hunyuan-alpha", "hunyuan_v1_dense", {**TIED, "head_dim": 12, **rope("dynamic", alpha=1000.0, factor=1.0)}),
    Row("hunyuan-alpha-hub", "hunyuan_v1_dense",
        {**SMALL, "head_dim": 8, **rope("dynamic", alpha=1000.0, factor=1.0)}, rewrite=hub),
    Row("hunyuan-sparse", "hunyuan_v1_dense", {**SMALL, "head_dim": 8}, rewrite=sparse()),
    Row("hunyuan-biases", "hunyuan_v1_dense", {**SMALL, "head_dim": 10, "attention_bias": True}),
    Row("hunyuan-dynamic-long", "hunyuan_v1_dense",
        {**SMALL, "head_dim": 8, "max_position_embeddings": 16, **rope("dynamic", factor=2.0)}),
]  # fmt: skip

MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}
GRANITE = [
    Row("granite-defaults", "granite", SMALL),
    Row("granite-sparse", "granite", SMALL, rewrite=sparse()),
    Row("granite", "granite", {**TIED, **MULTIPLIERS}),
    Row("granite-biases", "granite", {**SMALL, **MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
]

EXAONE = [
    Row("exaone4-window", "exaone4", {**DEEP, "sliding_window": 8, "sliding_window_pattern": 4}),
    Row("exaone4-full", "exaone4", {**TIED, "sliding_window": None, "layer_types": [FULL] * 3}),
    Row("exaone4-hub", "exaone4", {**DEEP, "sliding_window": 8, **rope("llama3", 1e6, **BANDS)}, rewrite=hub),
    Row("exaone4-sparse", "exaone4", DEEP, rewrite=sparse()),
    Row("exaone4-layer-types", "exaone4",
        {**WIDE, "sliding_window": 6, "layer_types": [FULL, LOCAL, FULL], **rope("llama3", 1e6, **BANDS)}),
]  # fmt: skip

ROWS = LLAMA + MISTRAL + QWEN + SMOLLM + OTHERS + GRANITE + EXAONE
