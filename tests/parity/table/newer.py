"""Single families that need little of their own: each with what sets it apart switched on, then off."""

from __future__ import annotations

from typing import Any

import torch

from .row import SMALL, Row

PLAIN = {"attention_bias": False, "tie_word_embeddings": True}
MOE = {"num_hidden_layers": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 12}
GLM = {**SMALL, **MOE, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2,
       "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2}  # fmt: skip
GLM_ONE_GROUP = {**GLM, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1}
ERNIE = {**SMALL, "num_hidden_layers": 5, "head_dim": 10, "moe_intermediate_size": 20, "moe_k": 3, "moe_num_experts": 7}
AFMOE = {**SMALL, **MOE, "num_hidden_layers": 6, "num_dense_layers": 2, "num_experts": 7, "sliding_window": 5}
HUNYUAN = {**SMALL, "head_dim": 10, "num_hidden_layers": 4, "intermediate_size": 28}
NARROW = {"vocab_size": 101, "max_position_embeddings": 64}


def balanced(model: Any) -> None:
    """Biases of the choice that change it."""
    generator = torch.Generator().manual_seed(4)
    for name, value in [*model.named_buffers(), *model.named_parameters()]:
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            value.data.copy_(0.3 * torch.randn(value.shape, generator=generator))


DENSE = [
    Row("helium", "helium", {**SMALL, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    Row("persimmon", "persimmon", {**SMALL, "num_key_value_heads": 6}),
    Row("persimmon-third", "persimmon",
        {**SMALL, "qk_layernorm": False, "hidden_act": "gelu", "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 25000.0, "partial_rotary_factor": 0.5},
         "max_position_embeddings": 24}),
    Row("nanochat", "nanochat", {**SMALL, "attention_bias": True, "final_logit_softcapping": 3.0}),
    Row("nanochat-uncapped", "nanochat", {**SMALL, **PLAIN, "final_logit_softcapping": None, "num_key_value_heads": 6}),
    Row("vaultgemma", "vaultgemma",
        {**SMALL, "num_hidden_layers": 4, "head_dim": 10, "query_pre_attn_scalar": 11, "sliding_window": 4,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0, "attention_bias": True}),
    Row("codegen", "codegen", {"vocab_size": 101, "n_positions": 64, "n_ctx": 64, "n_embd": 64, "n_layer": 3, "n_head": 8,
                               "rotary_dim": 6, "bos_token_id": 1, "eos_token_id": 2}),
    Row("biogpt", "biogpt", {**SMALL, "num_key_value_heads": 6, "max_position_embeddings": 64}),
    Row("biogpt-unscaled", "biogpt",
        {**SMALL, "num_key_value_heads": 6, "scale_embedding": False, "tie_word_embeddings": False, "hidden_act": "relu"}),
    Row("xglm", "xglm", {**NARROW, "d_model": 44, "ffn_dim": 70, "num_layers": 3, "attention_heads": 4}),
    Row("xglm-unscaled", "xglm", {**NARROW, "d_model": 32, "ffn_dim": 50, "num_layers": 2, "attention_heads": 4,
                                  "scale_embedding": False, "tie_word_embeddings": False}, prompt=64),
]  # fmt: skip

SPARSE = [
    Row("glm4_moe", "glm4_moe", GLM, adjust=balanced),
    Row("glm4_moe-one-group", "glm4_moe",
        {**GLM_ONE_GROUP, "attention_bias": False, "use_qk_norm": False, "norm_topk_prob": False}, adjust=balanced),
    Row("hunyuan_moe", "hunyuan_v1_moe",
        {**HUNYUAN, "num_experts": 5, "moe_topk": [2, 3, 1, 2], "attention_bias": True,
         "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}}),
    Row("hunyuan_moe-one", "hunyuan_v1_moe", {**HUNYUAN, "num_experts": 3, "moe_topk": 2, "tie_word_embeddings": True}),
    Row("minimax_m2", "minimax_m2",
        {**SMALL, "head_dim": 12, "num_experts_per_tok": 3, "num_local_experts": 7, "rotary_dim": 6}, adjust=balanced),
    Row("ernie4_5_moe", "ernie4_5_moe",
        {**ERNIE, "use_bias": True, "moe_layer_end_index": 3, "moe_layer_interval": 2}, adjust=balanced),
    Row("ernie4_5_moe-none-shared", "ernie4_5_moe",
        {**ERNIE, "moe_num_shared_experts": 0, "tie_word_embeddings": False}, adjust=balanced),
    Row("afmoe", "afmoe",
        {**AFMOE, "num_shared_experts": 2, "route_scale": 1.7, "global_attn_every_n_layers": 3, "mup_enabled": True,
         "attention_bias": True}, adjust=balanced),
]  # fmt: skip

ROWS = DENSE + SPARSE
