"""The table from GGUF keys to config.json names, through the writer that converters use."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType

from inferflow.weights.open import open_source

EMBEDDING = np.zeros((12, 8), np.float32)


def config(path: Path, tensors: dict[str, np.ndarray] | None = None, **calls: Any) -> Any:
    """The config of a GGUF on which each ``writer.add_<name>(value)`` was called."""
    writer = GGUFWriter(path / "m.gguf", "tiny")
    for name, value in calls.items():
        getattr(writer, f"add_{name}")(*(value if isinstance(value, tuple) else (value,)))
    for name, array in (tensors or {"token_embd.weight": EMBEDDING}).items():
        writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_source(path / "m.gguf").config


def test_sizes_and_their_many_names(tmp_path: Path) -> None:
    c = config(
        tmp_path,
        embedding_length=8,
        block_count=2,
        feed_forward_length=32,
        context_length=64,
        head_count=4,
        vocab_size=99,
    )
    assert c["model_type"] is None
    assert c["gguf_arch"] == "tiny"
    assert c["hidden_size"] == c["n_embd"] == c["d_model"] == 8
    assert c["num_hidden_layers"] == c["n_layer"] == c["num_layers"] == 2
    assert c["intermediate_size"] == c["n_inner"] == c["d_ff"] == 32
    assert c["num_attention_heads"] == c["n_head"] == c["num_key_value_heads"] == 4
    assert c["max_position_embeddings"] == 64
    assert c["vocab_size"] == 12  # the tensor's rows, not the key
    assert "head_dim" not in c
    assert c["rope_scaling"] is None
    assert c["gguf"]["embedding_length"] == 8


def test_float32_becomes_the_decimal_it_was(tmp_path: Path) -> None:
    c = config(tmp_path, layer_norm_rms_eps=1e-6, layer_norm_eps=1e-12, rope_freq_base=1e6, rope_freq_base_swa=1e4)
    assert c["rms_norm_eps"] == 1e-6
    assert c["layer_norm_eps"] == c["layer_norm_epsilon"] == c["norm_eps"] == c["norm_epsilon"] == 1e-12
    assert (c["rope_theta"], c["rope_local_base_freq"]) == (1e6, 1e4)
    assert c["gguf"]["attention"]["layer_norm_rms_epsilon"] == 1e-6


def test_per_layer_values_stay_lists_unless_equal(tmp_path: Path) -> None:
    c = config(tmp_path, head_count=[4, 8], head_count_kv=[2, 2], feed_forward_length=[16, 32])
    assert c["num_attention_heads"] == [4, 8]
    assert c["num_key_value_heads"] == 2
    assert c["intermediate_size"] == [16, 32]


@pytest.mark.parametrize(("calls", "fraction"), [({"key_length": 16}, 0.5), ({}, 4.0)])
def test_partial_rotary(calls: dict[str, int], fraction: float, tmp_path: Path) -> None:
    c = config(tmp_path, embedding_length=8, head_count=4, rope_dimension_count=8, **calls)
    assert c["rotary_dim"] == 8
    assert c["partial_rotary_factor"] == fraction


def test_windows(tmp_path: Path) -> None:
    c = config(tmp_path, sliding_window=512, sliding_window_pattern=6)
    assert (c["sliding_window"], c["sliding_window_pattern"]) == (512, 6)
    c = config(tmp_path, sliding_window=0, sliding_window_pattern=[True, False])
    assert c["sliding_window"] is None
    assert c["layer_types"] == ["sliding_attention", "full_attention"]


def test_experts(tmp_path: Path) -> None:
    c = config(
        tmp_path,
        block_count=10,
        expert_count=8,
        expert_used_count=2,
        expert_shared_count=1,
        expert_feed_forward_length=48,
        expert_shared_feed_forward_length=96,
        expert_weights_scale=2.5,
        expert_weights_norm=True,
        expert_gating_func=ExpertGatingFuncType.SIGMOID,
        expert_group_count=4,
        expert_group_used_count=2,
        leading_dense_block_count=3,
        nextn_predict_layers=1,
    )
    assert c["num_local_experts"] == c["num_experts"] == c["n_routed_experts"] == 8
    assert (c["num_experts_per_tok"], c["n_shared_experts"], c["moe_intermediate_size"]) == (2, 1, 48)
    assert (c["shared_expert_intermediate_size"], c["routed_scaling_factor"], c["norm_topk_prob"]) == (96, 2.5, True)
    assert (c["scoring_func"], c["n_group"], c["topk_group"], c["first_k_dense_replace"]) == ("sigmoid", 4, 2, 3)
    assert (c["num_hidden_layers"], c["num_nextn_predict_layers"]) == (9, 1)


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    c = config(tmp_path, expert_count=0, expert_used_count=0)
    assert "num_experts" not in c
    assert "num_experts_per_tok" not in c


def test_scalars(tmp_path: Path) -> None:
    c = config(
        tmp_path,
        logit_scale=0.0625,
        embedding_scale=12.0,
        residual_scale=0.22,
        attention_scale=0.015625,
        clamp_kqv=8.0,
        max_alibi_bias=8.0,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=0.0,
    )
    assert c["logit_scale"] == c["logits_scaling"] == 0.0625
    assert (c["embedding_multiplier"], c["residual_multiplier"], c["attention_multiplier"]) == (12.0, 0.22, 0.015625)
    assert (c["clip_qkv"], c["alibi_bias_max"], c["alibi"]) == (8.0, 8.0, True)
    assert (c["attn_logit_softcapping"], c["final_logit_softcapping"]) == (50.0, None)


@pytest.mark.parametrize("compressed", [True, False])
def test_latent_attention(compressed: bool, tmp_path: Path) -> None:
    """Newer files give the lengths of the compressed form and, apart, those of the heads; older ones the heads' only."""
    common = {"head_count": 16, "q_lora_rank": 24, "kv_lora_rank": 32, "rope_dimension_count": 8}
    if compressed:
        c = config(
            tmp_path, **common, head_count_kv=1, key_length=40, value_length=32, key_length_mla=20, value_length_mla=12
        )
    else:
        c = config(tmp_path, **common, head_count_kv=16, key_length=20, value_length=12)
    assert (c["q_lora_rank"], c["kv_lora_rank"], c["num_key_value_heads"]) == (24, 32, 16)
    assert (c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]) == (8, 12, 12)


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    c = config(tmp_path, rope_scaling_type=RopeScalingType.LINEAR, rope_scaling_factor=8.0)
    assert c["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    c = config(
        tmp_path,
        rope_scaling_type=RopeScalingType.YARN,
        rope_scaling_factor=40.0,
        rope_scaling_orig_ctx_len=4096,
        rope_scaling_yarn_beta_fast=32.0,
        rope_scaling_yarn_beta_slow=1.0,
        rope_scaling_yarn_log_mul=0.0707,
    )
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}
    assert c["rope_scaling"] == {**scaling, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    c = config(
        tmp_path, rope_scaling_type=RopeScalingType.YARN, rope_scaling_factor=4.0, rope_scaling_yarn_attn_factor=2.0
    )
    assert c["rope_scaling"]["attention_factor"] == 2.0 * (0.1 * math.log(4.0) + 1)


@pytest.mark.parametrize(
    "calls",
    [
        {"rope_scaling_type": RopeScalingType.NONE, "rope_scaling_factor": 4.0},
        {"rope_scaling_factor": 1.0},
        {"rope_scaling_factor": 0.0},
        {"rope_scaling_orig_ctx_len": 4096},
    ],
)
def test_no_scaling(calls: dict[str, Any], tmp_path: Path) -> None:
    assert config(tmp_path, **calls)["rope_scaling"] is None


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    assert config(tmp_path, rope_scaling_factor=4.0)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config(tmp_path, float32=("tiny.rope.scale_linear", 2.0))["rope_scaling"]["factor"] == 2.0


def test_rotary_factors_are_read_into_the_config(tmp_path: Path) -> None:
    factors = np.array([1, 1.5, 8, 8], np.float32)
    tensors = {"token_embd.weight": EMBEDDING, "rope_freqs.weight": factors}
    c = config(tmp_path, tensors)
    assert c["rope_scaling"] == {"rope_type": "factors", "factors": [1.0, 1.5, 8.0, 8.0]}
    assert set(open_source(tmp_path / "m.gguf").tensors) == {"token_embd.weight"}
    c = config(tmp_path, tensors, rope_scaling_type=RopeScalingType.LINEAR, rope_scaling_factor=2.0)
    assert c["rope_scaling"] == {"rope_type": "factors", "factors": [2.0, 3.0, 16.0, 16.0]}


def test_long_and_short_factors(tmp_path: Path) -> None:
    long, short = np.array([2.0, 4.0]), np.array([1.0, 1.25])
    tensors = {"token_embd.weight": EMBEDDING, "rope_factors_long.weight": long, "rope_factors_short.weight": short}
    c = config(tmp_path, tensors, rope_scaling_attn_factors=1.1875, rope_scaling_orig_ctx_len=4096)
    assert c["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [2.0, 4.0],
        "short_factor": [1.0, 1.25],
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.1875,
    }
    assert c["original_max_position_embeddings"] == 4096
    assert set(open_source(tmp_path / "m.gguf").tensors) == {"token_embd.weight"}


def test_vocabulary_and_stops(tmp_path: Path) -> None:
    c = config(tmp_path, {"w": EMBEDDING}, token_list=["a", "b", "c"], bos_token_id=0, eos_token_id=1, eot_token_id=2)
    assert c["vocab_size"] == 3
    assert (c["bos_token_id"], c["eos_token_id"]) == (0, 1)
    assert c["generation"] == {"eos_token_id": [1, 2]}
    assert c["tie_word_embeddings"] is True
    tensors = {"token_embd.weight": EMBEDDING, "output.weight": EMBEDDING}
    assert config(tmp_path, tensors)["tie_word_embeddings"] is False


def test_learned_activation_parameters(tmp_path: Path) -> None:
    c = config(
        tmp_path, xielu_alpha_p=[0.1, 0.2], xielu_alpha_n=[0.3, 0.4], xielu_beta=[0.5, 0.5], xielu_eps=[-1e-6, -1e-6]
    )
    assert c["xielu_alpha_p"] == [0.1, 0.2]
    assert c["xielu_beta"] == [0.5, 0.5]
