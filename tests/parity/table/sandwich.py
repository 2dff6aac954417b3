"""Norms around, after and beside the sublayers; windows and rotary positions that alternate from layer to layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .row import SMALL, Row

SEVEN = {**SMALL, "num_hidden_layers": 7, "head_dim": 12, "sliding_window": 8}  # one more than the longest period, 6
CAPPED = {**SEVEN, "num_hidden_layers": 3, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0}
CAPPED = {**CAPPED, "final_logit_softcapping": 4.0}
JOINT = {**SMALL, "num_key_value_heads": 3}
EXPERTS = {**JOINT, "intermediate_size": 20, "num_experts": 7, "num_experts_per_tok": 3}
PARALLEL = {**SMALL, "layer_norm_eps": 1e-4, "logit_scale": 0.5}
PARTIAL = {**SMALL, "head_dim": 12, "attention_bias": True}
TWO_BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7000.0},
}
FULL_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
ONE_STRETCHED = {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}, "full_attention": FULL_YARN}
PERIOD = {**JOINT, "num_hidden_layers": 5, "sliding_window": 8, "rope_parameters": ONE_STRETCHED}


def bfloat16_scale(model: Any) -> None:
    """The factor on the embeddings as it was in training."""
    for name, buffer in model.named_buffers():
        if name.endswith("embed_scale"):
            buffer.copy_(buffer.bfloat16().float())


def as_before(remove: tuple[str, ...], **keys: Any) -> Any:
    """A rewrite of config.json to what hub files had before rope_parameters and layer_types."""

    def rewrite(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text("utf-8"))
        kept = {k: v for k, v in config.items() if k not in ("rope_parameters", "layer_types", *remove)}
        path.write_text(json.dumps({**kept, **keys}), "utf-8")

    return rewrite


def inside(folder: Path) -> None:
    """config.json as of a multimodal model, whose text model is what was saved."""
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    outer = {"model_type": config["model_type"].replace("_text", ""), "text_config": config, "vision_config": {}}
    path.write_text(json.dumps(outer), "utf-8")


ROWS = [
    Row("gemma", "gemma", {**SMALL, "head_dim": 10}),
    Row("gemma-mqa-gelu", "gemma", {**SMALL, "head_dim": 16, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    Row(
        "gemma-before",
        "gemma",
        {**SMALL, "head_dim": 10},
        rewrite=as_before(("tie_word_embeddings",), rope_theta=10000.0),
    ),
    Row("gemma2", "gemma2", CAPPED),
    Row("gemma2-uncapped", "gemma2", {**CAPPED, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    Row("gemma2-list", "gemma2", {**CAPPED, "layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    Row("gemma2-before", "gemma2", CAPPED, rewrite=as_before(())),
    Row("gemma2-bfloat16", "gemma2", CAPPED, adjust=bfloat16_scale, rewrite=as_before((), dtype="bfloat16")),
    Row("gemma3", "gemma3_text", {**SEVEN, "query_pre_attn_scalar": 20}),
    Row("gemma3-two-bases", "gemma3_text", {**SEVEN, "rope_parameters": TWO_BASES, "final_logit_softcapping": 4.0}),
    Row(
        "gemma3-before",
        "gemma3_text",
        {**SEVEN, "rope_parameters": TWO_BASES, "sliding_window_pattern": 3},
        rewrite=as_before(
            (),
            sliding_window_pattern=3,
            rope_theta=7000.0,
            rope_local_base_freq=50.0,
            rope_scaling={"factor": 4.0, "rope_type": "linear"},
        ),
    ),
    Row("gemma3-inside", "gemma3_text", {**SEVEN, "tie_word_embeddings": False}, rewrite=inside),
    Row("olmo", "olmo", {**SMALL, "clip_qkv": 0.7}),
    Row(
        "olmo-biases-tied",
        "olmo",
        {**SMALL, "num_key_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True},
    ),
    Row("olmo2", "olmo2", JOINT),
    Row("olmo2-mha-biases", "olmo2", {**SMALL, "num_key_value_heads": 6, "attention_bias": True, "rope_theta": 500.0}),
    Row("olmo3", "olmo3", PERIOD),
    Row(
        "olmo3-before",
        "olmo3",
        {**PERIOD, "num_key_value_heads": 6},
        rewrite=as_before((), rope_theta=500.0, rope_scaling={k: v for k, v in FULL_YARN.items() if k != "rope_theta"}),
    ),
    Row("olmoe", "olmoe", EXPERTS),
    Row("olmoe-clip-normalised", "olmoe", {**EXPERTS, "clip_qkv": 0.5, "norm_topk_prob": True, "rms_norm_eps": 1e-3}),
    Row("cohere", "cohere", PARALLEL),
    Row(
        "cohere-qk-norm",
        "cohere",
        {**PARALLEL, "use_qk_norm": True, "tie_word_embeddings": False, "attention_bias": True},
    ),
    Row("cohere2", "cohere2", {**PARALLEL, "num_hidden_layers": 5, "sliding_window": 8}),
    Row(
        "cohere2-before",
        "cohere2",
        {**PARALLEL, "num_hidden_layers": 4, "sliding_window": 5, "rope_theta": 700.0, "sliding_window_pattern": 3},
        rewrite=as_before((), rope_theta=700.0, sliding_window_pattern=3),
    ),
    Row("glm", "glm", PARTIAL),
    Row(
        "glm-no-bias",
        "glm",
        {**PARTIAL, "attention_bias": False, "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
    ),
    Row("glm-before", "glm", {**PARTIAL, "rope_theta": 500.0}, rewrite=as_before((), rope_theta=500.0)),
    Row("glm4", "glm4", PARTIAL),
    Row("glm4-mqa", "glm4", {**PARTIAL, "num_key_value_heads": 1, "head_dim": 20, "attention_bias": False}),
]
