"""The same model as safetensors and as GGUF answers the same."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from inferflow.runtime.engine import Engine
from inferflow.runtime.executor import ReferenceExecutor
from inferflow.runtime.model import load_model

from .oracle import oracle
from .table import ROWS
from .twins import (
    EXPERTS,
    HEAD_NORMS,
    Config,
    Pairs,
    Twin,
    alphas,
    band_factors,
    convert,
    each,
    halves,
    latent,
    levelled,
    long_factors,
    one_added,
    parted,
    permuted,
    regrouped,
    renamed,
    rotary_share,
    transposed,
    unwoven,
    whole_latent,
    without,
)

if sys.version_info >= (3, 11):
    pass
else:
    pass

TOLERANCE = 1e-4
QUANTISED = next(row for row in ROWS if row.name == "llama-blocks")
CONV1D = transposed(r"\.(c_attn|c_proj|c_fc)\.weight$")
BARE = renamed((r"^transformer\.", ""))


def per_head(c: Config) -> int:
    return int(c.get("num_attention_heads") or c["n_head"])


def window(c: Config) -> dict[str, Any]:
    return {"sliding_window": c["sliding_window"] or 0}


def gemma2(c: Config) -> dict[str, Any]:
    caps = {f"{name}_logit_softcapping": c[f"{name}_logit_softcapping"] for name in ("attn", "final")}
    return window(c) | caps


def gpt2(c: Config) -> dict[str, Any]:
    return {"feed_forward_length": c["n_inner"] or 4 * c["n_embd"]}


def bloom(c: Config) -> dict[str, Any]:
    return {
        "context_length": c.get("seq_length", c["hidden_size"]),
        "feed_forward_length": 4 * c["hidden_size"],
        "head_count": c["n_head"],
        "head_count_kv": c["n_head"],
    }


def falcon(c: Config) -> dict[str, Any]:
    kv = c["num_kv_heads"] if c["new_decoder_architecture"] else 1 if c["multi_query"] else c["num_attention_heads"]
    return {"feed_forward_length": 4 * c["hidden_size"], "head_count_kv": kv, "context_length": 2048}


def falcon_parts(c: Config) -> tuple[int, int, int]:
    return c["num_attention_heads"] // falcon(c)["head_count_kv"], 1, 1


def mpt(c: Config) -> dict[str, Any]:
    attn = c["attn_config"]
    return {
        "feed_forward_length": 4 * c["d_model"],
        "max_alibi_bias": attn["alibi_bias_max"] if attn["alibi"] else 0.0,
        "clamp_kqv": attn["clip_qkv"],
        "layer_norm_eps": 1e-5,
    }


def latent_sizes(c: Config) -> dict[str, Any]:
    r, turning = c["kv_lora_rank"], c["qk_rope_head_dim"]
    return {
        "head_count_kv": 1,
        "leading_dense_block_count": c["first_k_dense_replace"],
        "q_lora_rank": c["q_lora_rank"],
        "kv_lora_rank": r,
        "key_length": r + turning,
        "value_length": r,
        "key_length_mla": c["qk_nope_head_dim"] + turning,
        "value_length_mla": c["v_head_dim"],
        "rope_dimension_count": turning,
    }


def deepseek(c: Config) -> dict[str, Any]:
    sigmoid = c["model_type"] == "deepseek_v3"
    rope = c["rope_parameters"]
    out = latent_sizes(c) | {
        "expert_count": c["n_routed_experts"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX,
    }
    if sigmoid or c.get("topk_method") == "group_limited_greedy":
        out |= {"expert_group_count": c["n_group"], "expert_group_used_count": c["topk_group"]}
    return out | ({"rope_scaling_yarn_log_mul": 0.1 * rope["mscale_all_dim"]} if "mscale_all_dim" in rope else {})


def qwen_moe(c: Config) -> dict[str, Any]:
    out = {"expert_feed_forward_length": c["moe_intermediate_size"]}
    shared = c.get("shared_expert_intermediate_size")
    return out | ({"expert_shared_feed_forward_length": shared} if shared else {})


def granite(c: Config) -> dict[str, Any]:
    names = {
        "attention_scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    shared = c.get("shared_intermediate_size")
    out = {call: c[key] for call, key in names.items()}
    return out | ({"expert_shared_feed_forward_length": shared} if shared else {})


def glm_moe(c: Config) -> dict[str, Any]:
    return rotary_share(c) | {
        "expert_count": c["n_routed_experts"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_group_count": c["n_group"],
        "expert_group_used_count": c["topk_group"],
        "leading_dense_block_count": c["first_k_dense_replace"],
    }


def hunyuan_moe(c: Config) -> dict[str, Any]:
    return {"expert_used_count": c["moe_topk"], "expert_shared_feed_forward_length": c["intermediate_size"]}


def mamba(c: Config) -> dict[str, Any]:
    """Sizes of the recurrence; there are no heads and no feed-forward, which the format says by 0."""
    inner = int(c["expand"] * c["hidden_size"])
    out = {
        "feed_forward_length": 0,
        "head_count": 0,
        "context_length": 1 << 20,
        "ssm_conv_kernel": c["conv_kernel"],
        "ssm_inner_size": inner,
        "ssm_state_size": c["state_size"],
        "ssm_time_step_rank": c.get("num_heads") or c["time_step_rank"],
        "layer_norm_rms_eps": c["layer_norm_epsilon"],
        "layer_norm_eps": None,
        "key_length": None,
        "value_length": None,
    }
    if c["model_type"] == "mamba2":
        return out | {"ssm_group_count": c["n_groups"]}
    return out | {"ssm_dt_b_c_rms": c["model_type"] == "falcon_mamba"}


@each
def recurrent(name: str, a: np.ndarray, c: Config) -> Pairs:
    """The decays as they are used, the convolution without its empty axis, the gated norm by groups."""
    if name.endswith("A_log"):
        a = -np.exp(a)
    if c["model_type"] == "mamba2" and name.endswith(("A_log", ".D")):
        a = a[:, None]
    if name.endswith("mixer.norm.weight"):
        a = a.reshape(c["n_groups"], -1)
    name = name.replace("dt_bias", "dt_proj.bias")
    yield name, a[:, 0] if name.endswith(("conv1d.weight", "conv.conv.weight")) else a


def lfm2(c: Config) -> dict[str, Any]:
    """The width is what comes of the config's; only layers with attention have key heads."""
    width = c["intermediate_size"]
    if c["block_auto_adjust_ff_dim"]:
        step = c["block_multiple_of"]
        width = step * math.ceil(int(c["block_ffn_dim_multiplier"] * int(2 * width / 3)) / step)
    kv = [c["num_key_value_heads"] * (kind == "full_attention") for kind in c["layer_types"]]
    more = {
        "head_count_kv": kv,
        "feed_forward_length": width,
        "layer_norm_rms_eps": c["norm_eps"],
        "layer_norm_eps": None,
    }
    return more | {"shortconv_l_cache": c["conv_L_cache"]}


def jamba(c: Config) -> dict[str, Any]:
    where = [i % c["attn_layer_period"] == c["attn_layer_offset"] for i in range(c["num_hidden_layers"])]
    return {
        "head_count_kv": [c["num_key_value_heads"] * full for full in where],
        "ssm_conv_kernel": c["mamba_d_conv"],
        "ssm_inner_size": c["mamba_expand"] * c["hidden_size"],
        "ssm_state_size": c["mamba_d_state"],
        "ssm_time_step_rank": c["mamba_dt_rank"],
    }


def gpt_oss(c: Config) -> dict[str, Any]:
    return window(c) | {"expert_feed_forward_length": c["intermediate_size"]}


def dbrx(c: Config) -> dict[str, Any]:
    attention, experts = c["attn_config"], c["ffn_config"]
    return {
        "feed_forward_length": experts["ffn_hidden_size"],
        "head_count_kv": attention["kv_n_heads"],
        "clamp_kqv": attention["clip_qkv"],
        "layer_norm_eps": 1e-5,
        "expert_count": experts["moe_num_experts"],
        "expert_used_count": experts["moe_top_k"],
    }


def llama4(c: Config) -> dict[str, Any]:
    return {
        "feed_forward_length": c["intermediate_size_mlp"],
        "expert_feed_forward_length": c["intermediate_size"],
        "interleave_moe_layer_step": c["interleave_moe_layer_step"],
    }


def periodic(c: Config) -> dict[str, Any]:
    return window(c) | {"sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]]}


def longrope(c: Config) -> dict[str, Any]:
    return (
        window(c)
        | rotary_share(c)
        | {"rope_scaling_orig_ctx_len": c["rope_parameters"]["original_max_position_embeddings"]}
    )


def raised_base(c: Config) -> dict[str, Any]:
    rope = c["rope_parameters"]
    return {"rope_freq_base": rope["rope_theta"] * rope["alpha"] ** (c["head_dim"] / (c["head_dim"] - 2))}


def xielu(c: Config) -> dict[str, Any]:
    n = c["num_hidden_layers"]
    return {
        "xielu_alpha_p": c["alpha_p"],
        "xielu_alpha_n": c["alpha_n"],
        "xielu_beta": [0.5] * n,
        "xielu_eps": [-1e-6] * n,
    }


def neox(c: Config) -> dict[str, Any]:
    return rotary_share(c) | {"parallel_residual": c["use_parallel_residual"]}


EACH_HEAD = regrouped(per_head, lambda c: (1, 1, 1))
FALCON = (regrouped(lambda c: falcon(c)["head_count_kv"], falcon_parts),)
SCORE_BIAS = renamed((r"e_score_correction_bias$", "e_score_correction.bias"))
DEEPSEEK = (EXPERTS, latent, SCORE_BIAS)
TWINS = [
    Twin("llama", "llama", (permuted,)),
    Twin("llama-mqa-odd", "llama", (permuted,)),
    Twin("llama-biases-headdim", "llama", (permuted,)),
    Twin("llama-3.1", "llama", (permuted, band_factors)),
    Twin("llama-linear", "llama", (permuted,)),
    Twin("llama-yarn", "llama", (permuted,)),
    Twin("llama-mha-tied", "llama", (permuted, without("lm_head"))),
    Twin("mistral-no-window", "llama", (permuted,)),
    Twin("qwen2", "qwen2"),
    Twin("qwen2-yarn", "qwen2"),
    Twin("qwen3", "qwen3"),
    Twin("qwen2_moe", "qwen2moe", (EXPERTS,), qwen_moe),
    Twin("qwen3_moe", "qwen3moe", (EXPERTS,), qwen_moe),
    Twin("mixtral", "llama", (permuted, EXPERTS)),
    Twin("gemma", "gemma", (one_added,)),
    Twin("gemma2-plain-scale", "gemma2", (one_added,), gemma2),
    Twin("gemma3-plain-scale", "gemma3", (one_added,), window),
    Twin("phi3", "phi3", (), lambda c: window(c) | rotary_share(c)),
    Twin("phi3-long-factors", "phi3", (long_factors,), longrope),
    Twin("smollm3", "smollm3", (permuted,)),
    Twin("arcee", "arcee", (permuted,)),
    Twin("seed_oss-biases", "seed_oss"),
    Twin("exaone4-full", "exaone4"),
    Twin("hunyuan", "hunyuan-dense"),
    Twin("hunyuan-alpha", "hunyuan-dense", (), raised_base),
    Twin("ernie4_5", "ernie4_5"),
    Twin("glm", "chatglm", (), rotary_share),
    Twin("apertus", "apertus", (alphas, band_factors), xielu),
    Twin("starcoder2", "starcoder2", (), window),
    Twin("stablelm", "stablelm", (), rotary_share),
    Twin("stablelm-qk-norm", "stablelm", (HEAD_NORMS,), rotary_share),
    Twin("phi", "phi2", (), rotary_share),
    Twin("nemotron", "nemotron", (one_added,), rotary_share),
    Twin("gpt_bigcode", "starcoder", (BARE,), gpt2),
    Twin("granite", "granite", (permuted,), granite),
    Twin("granitemoe", "granitemoe", (permuted, halves), granite),
    Twin("olmo", "olmo", (permuted,), lambda c: {"clamp_kqv": c["clip_qkv"], "layer_norm_eps": 1e-5}),
    Twin("olmo2", "olmo2"),
    Twin("olmo3", "olmo2", (), periodic),
    Twin("olmoe", "olmoe", (EXPERTS,)),
    Twin("cohere", "command-r", (), lambda c: {"logit_scale": c["logit_scale"]}),
    Twin("cohere2", "cohere2", (), lambda c: {"logit_scale": c["logit_scale"], **window(c)}),
    Twin("glm4", "glm4", (), rotary_share),
    Twin("gpt2", "gpt2", (BARE, CONV1D), gpt2),
    Twin("gpt2-untied-inner", "gpt2", (BARE, CONV1D), gpt2),
    Twin("bloom", "bloom", (BARE, EACH_HEAD), bloom),
    Twin("gpt_neox", "gptneox", (EACH_HEAD,), neox),
    Twin("gpt_neox-sequential", "gptneox", (EACH_HEAD,), neox),
    Twin("falcon-7b", "falcon", FALCON, falcon),
    Twin("falcon-40b", "falcon", FALCON, falcon),
    Twin("mpt", "mpt", (), mpt),
    Twin("deepseek_v2", "deepseek2", DEEPSEEK, deepseek),
    Twin("deepseek_v2-lite", "deepseek2", DEEPSEEK, deepseek),
    Twin("deepseek_v2-one-mscale", "deepseek2", DEEPSEEK, deepseek),
    Twin("deepseek_v3", "deepseek2", DEEPSEEK, deepseek),
    Twin("deepseek_v3-one-mscale", "deepseek2", DEEPSEEK, deepseek),
    Twin("deepseek_v2-whole", "deepseek2", (EXPERTS, whole_latent), deepseek),
    Twin("cohere-qk-norm-tied", "command-r", (), lambda c: {"logit_scale": c["logit_scale"]}),
    Twin("dbrx", "dbrx", (levelled,), dbrx),
    Twin("llama4-published", "llama4", (parted,), llama4),
    Twin("mamba", "mamba", (recurrent,), mamba),
    Twin("falcon_mamba", "mamba", (recurrent,), mamba),
    Twin("mamba2", "mamba2", (recurrent,), mamba),
    Twin("lfm2", "lfm2", (recurrent,), lfm2),
    Twin("jamba", "jamba", (recurrent, EXPERTS), jamba),
    Twin("glm4_moe", "glm4moe", (EXPERTS, SCORE_BIAS), glm_moe),
    Twin("glm4_moe-one-group", "glm4moe", (EXPERTS, SCORE_BIAS), glm_moe),
    Twin("hunyuan_moe-one", "hunyuan-moe", (EXPERTS,), hunyuan_moe),
    Twin("minimax_m2", "minimax-m2", (EXPERTS, SCORE_BIAS), lambda c: {"rope_dimension_count": c["rotary_dim"]}),
    Twin("gpt_oss-seven", "gpt-oss", (unwoven,), gpt_oss),
]


def answer(path: Path, ids: list[int]) -> np.ndarray:
    model = load_model(path)
    engine = Engine(model.graph, ReferenceExecutor(model.graph, model.weights), max_len=len(ids) + 1)
    return engine.forward(ids)["logits"]


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.row)
def test_twins_agree(twin: Twin, tmp_path: Path) -> None:
    folder, ids, want = oracle(next(row for row in ROWS if row.name == twin.row))
    got = answer(convert(twin, folder, tmp_path / "twin.gguf"), ids)
    assert np.abs(got - answer(folder, ids)).max() <= TOLERANCE
    assert np.abs(got - want).max() <= 2 * TOLERANCE


def test_a_quantised_twin_is_near(tmp_path: Path) -> None:
    """Q8_0 rounds each weight by up to 1/254 of its block's greatest: the logits move, but by far less than they are."""
    folder, ids, _ = oracle(QUANTISED)
    want = answer(folder, ids)
    path = convert(Twin(QUANTISED.name, "llama", (permuted,), quantised=True), folder, tmp_path / "q8.gguf")
    assert load_model(path).source.tensors["blk.0.attn_q.weight"].dtype == "Q8_0"
    error = np.abs(answer(path, ids) - want)
    assert 1e-5 < error.max() < 0.15
    assert np.sqrt((error**2).mean() / (want**2).mean()) < 0.03
