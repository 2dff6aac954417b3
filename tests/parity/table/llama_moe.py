"""The same line with mixtures of experts in place of some or all feed-forwards."""

from __future__ import annotations

from .llama_line import DEEP, FULL, LOCAL, MULTIPLIERS, SMALL, TIED, WIDE
from .row import Row, sparse

MOE = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
QWEN2_MOE = {**SMALL, **MOE, "shared_expert_intermediate_size": 36}

MIXTRAL = [
    Row("mixtral", "mixtral", {**SMALL, "num_local_experts": 4}),
    Row("mixtral-window", "mixtral", {**WIDE, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 8}),
    Row("mixtral-sparse", "mixtral", {**SMALL, "num_local_experts": 8}, rewrite=sparse()),
    Row("mixtral-tied-one", "mixtral", {**TIED, "num_local_experts": 7, "num_experts_per_tok": 1}),
]

QWEN = [
    Row("qwen2_moe", "qwen2_moe", QWEN2_MOE),
    Row("qwen2_moe-dense-layers", "qwen2_moe",
        {**QWEN2_MOE, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}),
    Row("qwen2_moe-window", "qwen2_moe",
        {**QWEN2_MOE, "num_hidden_layers": 5, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3,
         "qkv_bias": False, "tie_word_embeddings": True}),
    Row("qwen2_moe-layer-types", "qwen2_moe",
        {**QWEN2_MOE, "sliding_window": 6, "use_sliding_window": True, "layer_types": [FULL, LOCAL, FULL]}),
    Row("qwen2_moe-sparse", "qwen2_moe", {**QWEN2_MOE, "num_experts_per_tok": 4},
        rewrite=sparse(num_experts=6, moe_intermediate_size=20, shared_expert_intermediate_size=36)),
    Row("qwen3_moe-sparse", "qwen3_moe", {**SMALL, **MOE, "head_dim": 8, "num_experts": 9, "num_experts_per_tok": 8},
        rewrite=sparse(num_experts=9, moe_intermediate_size=20)),
    Row("qwen3_moe", "qwen3_moe", {**WIDE, **MOE, "norm_topk_prob": True}),
    Row("qwen3_moe-dense-layers", "qwen3_moe",
        {**DEEP, **MOE, "head_dim": 8, "decoder_sparse_step": 2, "mlp_only_layers": [1], "attention_bias": True}),
    Row("qwen3_moe-window", "qwen3_moe",
        {**TIED, **MOE, "num_experts_per_tok": 6, "sliding_window": 8, "use_sliding_window": True}),
]  # fmt: skip

GRANITE = [
    Row("granitemoe", "granitemoe", {**SMALL, **MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 3}),
    Row("granitemoe-tied-biases", "granitemoe", {**TIED, "num_local_experts": 3, "attention_bias": True}),
    Row("granitemoeshared", "granitemoeshared",
        {**SMALL, **MULTIPLIERS, "num_local_experts": 4, "shared_intermediate_size": 30}),
    Row("granitemoe-sparse", "granitemoe", {**SMALL, "num_local_experts": 8}, rewrite=sparse()),
    Row("granitemoeshared-none", "granitemoeshared", {**SMALL, "num_local_experts": 4, "shared_intermediate_size": 0}),
]  # fmt: skip

ROWS = MIXTRAL + QWEN + GRANITE
