"""Variants of which a GGUF file can carry every number: no scale, limit or factor that its format has no key for."""

from __future__ import annotations

from .latent_moe import CHUNKS, SINKS, UNROUNDED, V2, V3, YARN, balanced
from .row import SMALL, Row
from .sandwich import CAPPED, PARALLEL, SEVEN, TWO_BASES

ONE_MSCALE = {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "mscale": 0.7, "mscale_all_dim": 0.7, **YARN}
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0, 2.5, 4.0, 8.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "original_max_position_embeddings": 64,
}
STRETCHED = {**SMALL, "original_max_position_embeddings": 64, "rope_parameters": LONG}
PUBLISHED = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}

ROWS = [
    Row("llama-blocks", "llama", {**SMALL, "hidden_size": 96, "intermediate_size": 128}),  # rows of whole blocks of 32
    Row("gemma2-plain-scale", "gemma2", {**CAPPED, "query_pre_attn_scalar": 12}),
    Row("gemma3-plain-scale", "gemma3_text", {**SEVEN, "query_pre_attn_scalar": 12, "rope_parameters": TWO_BASES}),
    Row("phi3-long-factors", "phi3", STRETCHED, prompt=30),
    Row("deepseek_v2-one-mscale", "deepseek_v2", {**V2, **ONE_MSCALE}),
    Row("deepseek_v3-one-mscale", "deepseek_v3", {**V3, **ONE_MSCALE}, adjust=balanced),
    Row("deepseek_v2-whole", "deepseek_v2", V2),
    Row("cohere-qk-norm-tied", "cohere", {**PARALLEL, "use_qk_norm": True}),
    Row("llama4-published", "llama4_text", {**CHUNKS, **PUBLISHED, "interleave_moe_layer_step": 2}),
    Row("gpt_oss-seven", "gpt_oss", {**SINKS, **UNROUNDED, "swiglu_limit": 7.0}),
]
