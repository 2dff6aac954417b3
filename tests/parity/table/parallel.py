"""LayerNorm decoders with rotary positions: one norm for two sublayers, part of each head turning, long contexts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .row import SMALL, Row, sparse

PHI3 = {**SMALL, "pad_token_id": 0}
MOE = {**SMALL, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True}


def longrope(pairs: int = 4, **more: Any) -> dict[str, Any]:
    """A new dict each time: config classes write into the one they are given."""
    short = [1.0, 1.1, 1.3, 1.6][:pairs]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": [1.0, 2.5, 5.0, 9.0][:pairs], **more}


def linear() -> dict[str, Any]:
    return {"rope_type": "linear", "factor": 4.0}


def magnitudes(original: int) -> dict[str, Any]:
    return longrope(short_mscale=1.2, long_mscale=1.4, original_max_position_embeddings=original)


def long_factors(model: Any) -> None:
    """The class takes the short factors at every length, though it takes the long magnitude; the authors' code takes both."""
    rotary = model.model.rotary_emb
    made = rotary.rope_init_fn
    rotary.rope_init_fn = lambda config: made(config, seq_len=1 << 20)


def old_config(kind: str, folder: Path) -> None:
    """config.json as the hub has it: ``type`` in rope_scaling, the rest beside it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": kind, **{k: rope[k] for k in ("short_factor", "long_factor")}}
    path.write_text(json.dumps(config))


def old_su(folder: Path) -> None:
    old_config("su", folder)


def old_yarn(folder: Path) -> None:
    old_config("yarn", folder)


def long_context(original: int, pairs: int = 4, **more: Any) -> dict[str, Any]:
    return {**PHI3, "rope_scaling": longrope(pairs), "original_max_position_embeddings": original, **more}


ROWS = [
    Row("phi", "phi", SMALL),
    Row("phi-qk-norm", "phi", {**SMALL, "num_key_value_heads": 3, "qk_layernorm": True, "partial_rotary_factor": 0.75}),
    Row(
        "phi-mha-linear",
        "phi",
        {**SMALL, "num_key_value_heads": None, "rope_scaling": linear(), "hidden_act": "gelu", "layer_norm_eps": 0.1},
    ),
    Row("phi-sparse", "phi", SMALL, rewrite=sparse()),
    Row("phi-before", "phi", {**SMALL, "partial_rotary_factor": 0.75}, rewrite=sparse(partial_rotary_factor=0.75)),
    Row("phi3", "phi3", PHI3),
    Row("phi3-sparse", "phi3", {**SMALL, "rms_norm_eps": 1e-5}, rewrite=sparse()),
    Row(
        "phi3-before",
        "phi3",
        {**SMALL, "rms_norm_eps": 0.1, "partial_rotary_factor": 0.75},
        rewrite=sparse(partial_rotary_factor=0.75, rms_norm_eps=0.1),
    ),
    Row(
        "phi3-sparse-long",
        "phi3",
        {**SMALL, "max_position_embeddings": 8192, "rope_scaling": longrope(original_max_position_embeddings=4096)},
        rewrite=sparse(rope_scaling=longrope()),
    ),
    Row("phimoe-sparse", "phimoe", {**SMALL, "num_local_experts": 16}, rewrite=sparse()),
    Row(
        "phimoe-before",
        "phimoe",
        {**SMALL, "rope_theta": 500.0, "num_local_experts": 16, "rms_norm_eps": 0.1},
        rewrite=sparse(rope_theta=500.0, rms_norm_eps=0.1),
    ),
    Row("stablelm-sparse", "stablelm", SMALL, rewrite=sparse()),
    Row(
        "stablelm-before",
        "stablelm",
        {**SMALL, "partial_rotary_factor": 0.5, "layer_norm_eps": 0.1},
        rewrite=sparse(rope_pct=0.5, norm_eps=0.1),
    ),
    Row("starcoder2-sparse", "starcoder2", SMALL, rewrite=sparse()),
    Row("nemotron-sparse", "nemotron", SMALL, rewrite=sparse()),
    Row(
        "nemotron-before",
        "nemotron",
        {**SMALL, "partial_rotary_factor": 0.75, "norm_eps": 0.1},
        rewrite=sparse(rope_percent=0.75, norm_epsilon=0.1),
    ),
    Row("phi3-window", "phi3", {**PHI3, "sliding_window": 8, "num_key_value_heads": None, "tie_word_embeddings": True}),
    Row("phi3-long", "phi3", long_context(32)),
    Row("phi3-short", "phi3", long_context(64)),
    Row("phi3-at-the-boundary", "phi3", long_context(40)),
    Row("phi3-partial-long", "phi3", long_context(32, 3, partial_rotary_factor=0.75, sliding_window=11)),
    Row("phi3-su", "phi3", long_context(32), rewrite=old_su),
    Row("phi3-yarn", "phi3", long_context(64), rewrite=old_yarn),
    Row("phimoe", "phimoe", MOE),
    Row("phimoe-short", "phimoe", {**MOE, "rope_scaling": magnitudes(64), "sliding_window": 9}),
    Row(
        "phimoe-long",
        "phimoe",
        {**MOE, "rope_scaling": magnitudes(32), "router_jitter_noise": 0.2},
        adjust=long_factors,
    ),
    Row(
        "phimoe-bare",
        "phimoe",
        {**MOE, "attention_bias": False, "lm_head_bias": False, "hidden_act": "gelu", "rope_theta": 500.0},
    ),
    Row("stablelm", "stablelm", SMALL),
    Row(
        "stablelm-biases",
        "stablelm",
        {**SMALL, "use_qkv_bias": True, "tie_word_embeddings": True, "rope_theta": 500.0, "layer_norm_eps": 0.1},
    ),
    Row(
        "stablelm-12b",
        "stablelm",
        {**SMALL, "use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    ),
    Row("stablelm-qk-norm", "stablelm", {**SMALL, "qk_layernorm": True, "num_key_value_heads": 3}),
    Row("starcoder2", "starcoder2", {**SMALL, "sliding_window": 8}),
    Row(
        "starcoder2-bare",
        "starcoder2",
        {**SMALL, "use_bias": False, "tie_word_embeddings": False, "norm_epsilon": 0.1, "hidden_act": "relu"},
    ),
    Row("nemotron", "nemotron", SMALL),
    Row(
        "nemotron-biases",
        "nemotron",
        {**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 12, "norm_eps": 0.1},
    ),
    Row(
        "nemotron-whole",
        "nemotron",
        {**SMALL, "partial_rotary_factor": 1.0, "tie_word_embeddings": True, "hidden_act": "relu"},
    ),
]
