"""Families whose layers, or some of them, carry a state from token to token."""

from __future__ import annotations

from .row import SMALL, Row

TINY = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
STATE = {"state_size": 5, "conv_kernel": 3}
JAMBA = {**SMALL, "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
         "num_experts": 4, "mamba_d_state": 5, "mamba_d_conv": 3}  # fmt: skip
HEADS = {"num_heads": 8, "head_dim": 8, "n_groups": 2}
MIXTURE = {
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 24,
}
DELTA = {**SMALL, **MIXTURE, "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 12}  # fmt: skip
H1 = {**SMALL, "num_hidden_layers": 2, "mamba_d_ssm": 40, "mamba_n_heads": 5, "mamba_d_head": 8, "mamba_n_groups": 1,
      "mamba_d_state": 6, "key_multiplier": 0.7, "mlp_multipliers": [0.8, 1.3], "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
      "embedding_multiplier": 2.0, "lm_head_multiplier": 0.6, "attention_in_multiplier": 1.1,
      "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8}  # fmt: skip

ROWS = [
    Row("mamba", "mamba", {**TINY, **STATE}),
    Row("mamba-biases-untied", "mamba",
        {**TINY, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "time_step_rank": 3, "expand": 3}),
    Row("falcon_mamba", "falcon_mamba", {**TINY, **STATE}),
    Row("mamba2", "mamba2", {**TINY, **STATE, **HEADS, "chunk_size": 16}),
    Row("mamba2-limits", "mamba2",
        {**TINY, **HEADS, "n_groups": 1, "state_size": 7, "time_step_limit": (0.5, 1.0), "use_bias": True,
         "tie_word_embeddings": True, "chunk_size": 16}),
    Row("jamba", "jamba", JAMBA),
    Row("jamba-dense", "jamba", {**JAMBA, "num_experts": 1, "mamba_proj_bias": True, "mamba_dt_rank": 5}),
    Row("qwen3_next", "qwen3_next", DELTA),
    Row("qwen3_next-types", "qwen3_next",
        {**DELTA, "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"],
         "mlp_only_layers": [1], "attention_bias": True, "norm_topk_prob": False}),
    Row("lfm2", "lfm2",
        {**SMALL, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.2, "full_attn_idxs": [1]}),
    Row("lfm2-plain", "lfm2",
        {**SMALL, "block_auto_adjust_ff_dim": False, "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False,
         "layer_types": ["conv", "conv", "full_attention"]}),
    Row("falcon_h1", "falcon_h1", {**H1, "mamba_chunk_size": 16, "attention_bias": True, "mlp_bias": True}),
    Row("falcon_h1-normed", "falcon_h1",
        {**H1, "mamba_n_heads": 4, "mamba_d_head": 10, "mamba_n_groups": 2, "mamba_rms_norm": True,
         "mamba_norm_before_gate": False, "mamba_proj_bias": True, "projectors_bias": True, "mamba_chunk_size": 16}),
]  # fmt: skip
