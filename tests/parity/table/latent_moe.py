"""Latent attention, many experts, sinks, chunks: the large mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from .row import SMALL, Row
from .sandwich import as_before

LATENT = {
    **SMALL,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
STRETCHED = {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "mscale": 0.7, "mscale_all_dim": 1.0, **YARN}
}
DBRX = {"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 128, "vocab_size": 101}
DBRX_ATTENTION = {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 500.0}
DBRX_EXPERTS = {"ffn_hidden_size": 20, "moe_num_experts": 6, "moe_top_k": 3}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
SINKS = {
    **SMALL,
    "head_dim": 12,
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
}
SINKS = {**SINKS, "num_hidden_layers": 4, "swiglu_limit": 0.6}
NARROW = {**YARN, "beta_fast": 1.0, "beta_slow": 0.2, "truncate": False}  # the band's ends fall between two channels
UNROUNDED = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **NARROW}}
ONE_STEP = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 16.0, "original_max_position_embeddings": 16}
ONE_STEP = {**ONE_STEP, "low_freq_factor": 1.0, "high_freq_factor": 1.0}  # as Scout has it: no band between
CHUNKS = {
    **SMALL,
    "head_dim": 12,
    "num_hidden_layers": 5,
    "intermediate_size": 20,
    "intermediate_size_mlp": 70,
    "num_local_experts": 5,
    "attention_chunk_size": 8,
    "floor_scale": 7,
    "attn_scale": 0.5,
}
V2, V3 = {**LATENT, "topk_method": "greedy"}, {**LATENT, **GROUPS}


def balanced(model: Any) -> None:
    """Biases of the choice that change it."""
    generator = torch.Generator().manual_seed(4)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
PACKED = "gate_up_proj", "down_proj"


def packed(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w [e, in, out] as mxfp4 blocks [e, out, in / 32, 16] and scales [e, out, in / 32]; exact where w is of that format."""
    blocks = w.swapaxes(1, 2).reshape(*w.shape[:1], w.shape[2], -1, 32)
    scale = np.floor(np.log2(np.abs(blocks).max(-1))).astype(np.int32) - 2
    scaled = np.ldexp(blocks, -scale[..., None])
    codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1) | (np.signbit(scaled) << 3)
    pairs, powers = codes[..., ::2] | codes[..., 1::2] << 4, scale + 127
    return np.ascontiguousarray(pairs, np.uint8), np.ascontiguousarray(powers, np.uint8)


def four_bits(model: Any) -> None:
    """Experts' weights that mxfp4 can hold, as transformers reads them."""
    for name, parameter in model.named_parameters():
        if name.endswith(PACKED):
            blocks, scales = (torch.from_numpy(a) for a in packed(parameter.detach().numpy()))
            parameter.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


def in_four_bits(folder: Path) -> None:
    """The experts as the hub's files have them: NAME_blocks and NAME_scales."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(PACKED)]:
        tensors[name + "_blocks"], tensors[name + "_scales"] = packed(tensors.pop(name))
    save_file(tensors, path)


ROWS = [
    Row("deepseek_v2", "deepseek_v2", V2),
    Row(
        "deepseek_v2-lite",
        "deepseek_v2",
        {**V2, "q_lora_rank": None, "n_shared_experts": 3, "first_k_dense_replace": 0},
    ),
    Row(
        "deepseek_v2-groups",
        "deepseek_v2",
        {**V2, **GROUPS, "topk_method": "group_limited_greedy", "attention_bias": True},
    ),
    Row("deepseek_v2-yarn", "deepseek_v2", {**V2, **STRETCHED}),
    Row(
        "deepseek_v2-before",
        "deepseek_v2",
        {**V2, **STRETCHED},
        rewrite=as_before(
            (),
            rope_theta=500.0,
            moe_layer_freq=1,
            rope_scaling={"type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.0, **YARN},
        ),
    ),
    Row("deepseek_v3", "deepseek_v3", V3, adjust=balanced),
    Row("deepseek_v3-yarn", "deepseek_v3", {**V3, **STRETCHED, "num_hidden_layers": 4}, adjust=balanced),
    Row("deepseek_v3-half", "deepseek_v3", {**V3, "rope_interleave": False, "norm_topk_prob": False}, adjust=balanced),
    Row(
        "deepseek_v3-one-group",
        "deepseek_v3",
        {**V3, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "attention_bias": True},
        adjust=balanced,
    ),
    Row("dbrx", "dbrx", {**DBRX, **THETA, "attn_config": DBRX_ATTENTION, "ffn_config": DBRX_EXPERTS}),
    Row(
        "dbrx-before",
        "dbrx",
        {
            **DBRX,
            **THETA,
            "attn_config": DBRX_ATTENTION,
            "ffn_config": {**DBRX_EXPERTS, "ffn_act_fn": {"name": "gelu"}},
        },
        rewrite=as_before(()),
    ),
    Row(
        "dbrx-plain-sum",
        "dbrx",
        {
            **DBRX,
            **THETA,
            "attn_config": {**DBRX_ATTENTION, "clip_qkv": 0.3, "kv_n_heads": 6},
            "ffn_config": {**DBRX_EXPERTS, "moe_normalize_expert_weights": None},
        },
    ),
    Row("gpt_oss", "gpt_oss", {**SINKS, **UNROUNDED}),
    Row(
        "gpt_oss-truncated", "gpt_oss", {**SINKS, "rope_parameters": {**UNROUNDED["rope_parameters"], "truncate": True}}
    ),
    Row(
        "gpt_oss-before",
        "gpt_oss",
        {**SINKS, **UNROUNDED, "attention_bias": False},
        rewrite=as_before((), rope_theta=500.0, rope_scaling={"rope_type": "yarn", **NARROW}),
    ),
    Row(
        "gpt_oss-mxfp4",
        "gpt_oss",
        {**SINKS, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2},
        adjust=four_bits,
        rewrite=in_four_bits,
    ),
    Row("llama4", "llama4_text", CHUNKS),
    Row("llama4-one-step", "llama4_text", {**CHUNKS, "rope_parameters": ONE_STEP}),
    Row("llama4-interleaved", "llama4_text", {**CHUNKS, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2}),
    Row(
        "llama4-bare",
        "llama4_text",
        {**CHUNKS, "use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True},
    ),
    Row("llama4-no-chunks", "llama4_text", {**CHUNKS, "attention_chunk_size": None, "no_rope_layers": [1, 0, 0, 1, 1]}),
    Row(
        "llama4-before",
        "llama4_text",
        {**CHUNKS, **THETA, "moe_layers": [1, 3]},
        rewrite=as_before((), rope_theta=500.0, no_rope_layers=[], rope_scaling=None),
    ),
]
