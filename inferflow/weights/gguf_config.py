"""GGUF metadata in the names of a Hugging Face config.json: one table, for every architecture.

`general.architecture` is the prefix of a model's keys. Where the hub uses several names for one thing, all of them are
set, so that a spec written for config.json reads a GGUF unchanged. What converters do for one architecture only is not
here: that belongs into the spec of the family. Everything under the prefix is also in ``config["gguf"]``, nested at the
dots and under the file's own names, for specs that need more than the table has.

float32 values are given as the shortest decimal that stands for them (1e-06, not 9.999999974752427e-07): that is the
number that config.json had before the conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from inferflow.weights.files import corrupt
from inferflow.weights.gguf_header import StringArray
from inferflow.weights.source import TensorInfo

__all__ = ["CONSUMED", "config_from_gguf"]

# Tensors that are read into the config's rope_scaling.
_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
CONSUMED = frozenset({_FREQS, _LONG, _SHORT})

_MAX_LIST = 1 << 16
_MAX_FACTORS = 1 << 14

# key (below the architecture's prefix) -> type, names in config.json. "ints": a number, or one for each layer.
_TABLE: dict[str, tuple[str, tuple[str, ...]]] = {
    "vocab_size": ("int", ("vocab_size",)),
    "context_length": ("int", ("max_position_embeddings", "n_positions")),
    "embedding_length": ("int", ("hidden_size", "n_embd", "d_model", "dim")),
    "block_count": ("int", ("num_hidden_layers", "n_layer", "num_layers", "n_layers")),
    "decoder_block_count": ("int", ("num_decoder_layers", "decoder_layers")),
    "feed_forward_length": (
        "ints",
        ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim"),
    ),
    "use_parallel_residual": ("bool", ("use_parallel_residual",)),
    "decoder_start_token_id": ("int", ("decoder_start_token_id",)),
    "attention.head_count": ("ints", ("num_attention_heads", "n_head", "num_heads", "n_heads")),
    "attention.head_count_kv": ("ints", ("num_key_value_heads", "num_kv_heads")),
    "attention.key_length": ("int", ("head_dim", "d_kv")),
    "attention.value_length": ("int", ("v_head_dim",)),
    "attention.key_length_swa": ("int", ("swa_head_dim",)),
    "attention.value_length_swa": ("int", ("swa_v_head_dim",)),
    "attention.layer_norm_rms_epsilon": ("float", ("rms_norm_eps",)),
    "attention.layer_norm_epsilon": ("float", ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")),
    "attention.causal": ("bool", ("is_causal",)),
    "attention.scale": ("float", ("attention_multiplier",)),
    "attention.output_scale": ("float", ("attention_output_multiplier", "attn_output_multiplier")),
    "attention.clamp_kqv": ("float", ("clip_qkv",)),
    "attention.max_alibi_bias": ("float", ("alibi_bias_max",)),
    "attention.q_lora_rank": ("int", ("q_lora_rank",)),
    "attention.kv_lora_rank": ("int", ("kv_lora_rank",)),
    "attention.sliding_window": ("ints", ("sliding_window",)),
    "attention.relative_buckets_count": ("int", ("relative_attention_num_buckets",)),
    "attention.shared_kv_layers": ("int", ("num_kv_shared_layers",)),
    "attention.temperature_length": ("int", ("floor_scale",)),
    "attention.temperature_scale": ("float", ("attn_scale",)),
    "attention.indexer.head_count": ("int", ("index_n_heads",)),
    "attention.indexer.key_length": ("int", ("index_head_dim",)),
    "attention.indexer.top_k": ("int", ("index_topk",)),
    "attn_logit_softcapping": ("float", ("attn_logit_softcapping",)),
    "router_logit_softcapping": ("float", ("router_logit_softcapping",)),
    "final_logit_softcapping": ("float", ("final_logit_softcapping",)),
    "rope.freq_base": ("float", ("rope_theta", "rotary_emb_base")),
    "rope.freq_base_swa": ("float", ("rope_local_base_freq",)),
    "rope.dimension_count": ("ints", ("rotary_dim",)),
    "rope.dimension_sections": ("list", ("mrope_section",)),
    "logit_scale": ("float", ("logit_scale", "logits_scaling")),
    "embedding_scale": ("float", ("embedding_multiplier", "scale_emb")),
    "residual_scale": ("float", ("residual_multiplier",)),
    "expert_count": ("ints", ("num_local_experts", "num_experts", "n_routed_experts")),
    "expert_used_count": ("ints", ("num_experts_per_tok", "moe_topk")),
    "expert_shared_count": ("ints", ("n_shared_experts", "num_shared_experts")),
    "expert_feed_forward_length": ("ints", ("moe_intermediate_size",)),
    "expert_shared_feed_forward_length": ("int", ("shared_expert_intermediate_size", "shared_intermediate_size")),
    "expert_weights_scale": ("float", ("routed_scaling_factor",)),
    "expert_weights_norm": ("bool", ("norm_topk_prob",)),
    "expert_group_count": ("int", ("n_group",)),
    "expert_group_used_count": ("int", ("topk_group",)),
    "leading_dense_block_count": ("int", ("first_k_dense_replace",)),
    "moe_every_n_layers": ("int", ("moe_every_n_layers",)),
    "interleave_moe_layer_step": ("int", ("interleave_moe_layer_step",)),
    "nextn_predict_layers": ("int", ("num_nextn_predict_layers",)),
    "full_attention_interval": ("int", ("full_attention_interval",)),
    "embedding_length_per_layer_input": ("int", ("hidden_size_per_layer_input",)),
    "altup.active_idx": ("int", ("altup_active_idx",)),
    "altup.num_inputs": ("int", ("altup_num_inputs",)),
    "ssm.conv_kernel": ("int", ("conv_kernel", "linear_conv_kernel_dim")),
    "ssm.state_size": ("int", ("state_size", "ssm_state_size", "linear_key_head_dim")),
    "ssm.time_step_rank": ("int", ("time_step_rank", "linear_num_value_heads")),
    "ssm.group_count": ("int", ("n_groups", "linear_num_key_heads")),
    "shortconv.l_cache": ("int", ("conv_L_cache",)),
    "wkv.head_size": ("int", ("head_size",)),
}

# Keys without the architecture's prefix.
_GLOBAL: dict[str, tuple[str, tuple[str, ...]]] = {
    "tokenizer.ggml.bos_token_id": ("int", ("bos_token_id",)),
    "tokenizer.ggml.eos_token_id": ("int", ("eos_token_id",)),
    "tokenizer.ggml.padding_token_id": ("int", ("pad_token_id",)),
    "tokenizer.ggml.unknown_token_id": ("int", ("unk_token_id",)),
    "xielu.alpha_p": ("list", ("xielu_alpha_p",)),
    "xielu.alpha_n": ("list", ("xielu_alpha_n",)),
    "xielu.beta": ("list", ("xielu_beta",)),
    "xielu.eps": ("list", ("xielu_eps",)),
}

# Where 0 stands for "not there", which a config.json says by null.
_ZERO_IS_NONE = frozenset(
    {"clip_qkv", "alibi_bias_max", "attn_logit_softcapping", "final_logit_softcapping", "sliding_window"}
    | {"q_lora_rank", "kv_lora_rank", "n_group", "topk_group", "router_logit_softcapping"}
)
_SCORING = {1: "softmax", 2: "sigmoid", 3: "softmax_topk", 4: "sqrtsoftplus"}
_STOPS = ("eos", "eot", "eom")


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], read: Callable[[str], Any], where: str
) -> dict[str, Any]:
    """The config of a GGUF model. `tensors` are all that the file lists, `read` gives one of them as an array.

    Raises CheckpointError for a missing architecture and for values of a wrong type.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise corrupt(where, "has no general.architecture, which says what model it is")
    config: dict[str, Any] = {"model_type": None, "gguf_arch": arch, "gguf": _nested(metadata, arch + ".")}
    for prefix, table in ((arch + ".", _TABLE), ("", _GLOBAL)):
        for key, (kind, names) in table.items():
            if prefix + key in metadata:
                value = _typed(metadata[prefix + key], kind, prefix + key, where)
                config.update(dict.fromkeys(names, value))
    _derive_attention(config)
    _derive_rotary(config)
    _derive_experts(config, metadata.get(f"{arch}.expert_gating_func"))
    _derive_window(config, metadata.get(f"{arch}.attention.sliding_window_pattern"), where)
    _derive_vocabulary(config, metadata, tensors)
    scaling = _rope_scaling(config, metadata, arch + ".rope.", where)
    config["rope_scaling"] = _rope_factors(scaling, tensors, read, where)
    return config


def _typed(value: Any, kind: str, key: str, where: str) -> Any:
    """`value` as an int, float, bool or list of these; equal values of all layers become one."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and kind in ("ints", "list"):
        if value.size > _MAX_LIST:
            _refuse(where, key, f"has {value.size} elements")
        items = [_plain(item) for item in value]
        if kind == "ints" and items and all(item == items[0] for item in items):
            return items[0]
        return items
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "list" and isinstance(value, float):
        return [_plain(value)]
    if kind in ("int", "ints") and type(value) is int:
        return value
    if kind == "float" and type(value) in (int, float) and math.isfinite(value):
        return float(_plain(value))
    return _refuse(where, key, f"is {str(value)[:40]!r}, not of type {kind}")


def _refuse(where: str, key: str, reason: str) -> NoReturn:
    raise corrupt(where, f"metadata key '{key[:80]}' {reason}")


def _plain(value: Any) -> Any:
    """A Python number; float32 as its shortest decimal."""
    if isinstance(value, (np.generic, float)) and not isinstance(value, (np.integer, np.bool_)):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if float(single) == float(value) else float(value)
    return value.item() if isinstance(value, np.generic) else value


def _nested(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Numbers, strings and short numeric arrays below `prefix`, nested at the dots."""
    root: dict[str, Any] = {}
    for key, value in metadata.items():
        if not key.startswith(prefix) or key.count(".") > 8:
            continue
        if isinstance(value, np.ndarray) and value.size <= _MAX_LIST:
            value = [_plain(item) for item in value]
        elif not isinstance(value, (int, float, str)):
            continue
        table = root
        *parents, last = key[len(prefix) :].split(".")
        for part in parents:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                break
            table = inner
        else:
            table.setdefault(last, _plain(value))
    return root


def _derive_attention(config: dict[str, Any]) -> None:
    """Defaults between the head counts; multi-head latent attention, which GGUF describes in its compressed form."""
    if config.get("num_attention_heads") is not None:
        for name in _TABLE["attention.head_count_kv"][1]:
            config.setdefault(name, config["num_attention_heads"])
    for name in _ZERO_IS_NONE & config.keys():
        config[name] = config[name] or None
    if config.get("alibi_bias_max"):
        config["alibi"] = True
    if not config.get("kv_lora_rank"):
        return
    attention = config["gguf"].get("attention", {})
    key, value = attention.get("key_length_mla"), attention.get("value_length_mla")
    key = config.get("head_dim") if key is None else key
    value = config.get("v_head_dim") if value is None else value
    rotary = config.get("rotary_dim")
    config["num_key_value_heads"] = config.get("num_attention_heads")
    if type(key) is int and type(rotary) is int:
        config.update(qk_rope_head_dim=rotary, qk_nope_head_dim=key - rotary, qk_head_dim=key, head_dim=key)
    config["v_head_dim"] = value


def _derive_rotary(config: dict[str, Any]) -> None:
    rotary, head_dim = config.get("rotary_dim"), config.get("head_dim")
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if head_dim is None and type(heads) is int and type(width) is int and heads > 0:
        head_dim = width // heads
    if type(rotary) is int and type(head_dim) is int and head_dim > 0:
        fraction = rotary / head_dim
        config.update(partial_rotary_factor=fraction, rotary_pct=fraction)


def _derive_experts(config: dict[str, Any], gating: Any) -> None:
    """An expert count of 0 means a dense model. Layers that only predict further tokens are not counted on the hub."""
    if config.get("num_experts") == 0:
        for key in ("expert_count", "expert_used_count"):
            for name in _TABLE[key][1]:
                config.pop(name, None)
    if config.get("routed_scaling_factor") == 0.0:
        config["routed_scaling_factor"] = 1.0
    if type(gating) is int and gating in _SCORING:
        config["scoring_func"] = _SCORING[gating]
    extra, layers = config.get("num_nextn_predict_layers"), config.get("num_hidden_layers")
    if type(extra) is int and type(layers) is int and 0 < extra < layers:
        for name in _TABLE["block_count"][1]:
            config[name] = layers - extra


def _derive_window(config: dict[str, Any], pattern: Any, where: str) -> None:
    """The pattern of windowed layers is a period, or a flag for each layer."""
    if type(pattern) is int:
        config["sliding_window_pattern"] = pattern
    elif isinstance(pattern, np.ndarray) and pattern.size <= _MAX_LIST:
        config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in pattern.tolist()]
    elif pattern is not None:
        _refuse(where, "attention.sliding_window_pattern", "is neither a number nor a list")


def _derive_vocabulary(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """The embedding's rows are the vocabulary, whatever the tokenizer has; they are tied where no output matrix is."""
    embedding = tensors.get("token_embd.weight")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if embedding is not None and len(embedding.shape) == 2:
        config["vocab_size"] = embedding.shape[0]
    elif isinstance(tokens, StringArray):
        config["vocab_size"] = len(tokens)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    stops = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _STOPS]
    ids = list(dict.fromkeys(i for i in stops if type(i) is int))
    if ids:
        config["generation"] = {"eos_token_id": ids if len(ids) > 1 else ids[0]}


# key below rope.scaling. -> name in a rope_scaling table
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "alpha": "alpha",
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_ext_factor": "ext_factor",
    "yarn_log_multiplier": "mscale_all_dim",
}


def _rope_scaling(config: dict[str, Any], metadata: Mapping[str, Any], prefix: str, where: str) -> dict[str, Any]:
    """A rope_scaling table as config.json has it; its rope_type is ``none`` where no scaling is asked for.

    Two units differ. GGUF's yarn `attn_factor` multiplies the usual magnitude 0.1·ln(factor)+1, the hub's
    `attention_factor` replaces it. GGUF's `yarn_log_multiplier` is a tenth of the hub's `mscale_all_dim`, and leaves
    `mscale` equal to it.
    """
    kind = metadata.get(prefix + "scaling.type")
    if kind is not None and not isinstance(kind, str):
        _refuse(where, prefix + "scaling.type", "is not a string")
    values: dict[str, Any] = {}
    for key, name in {"scale_linear": "factor", **{f"scaling.{k}": v for k, v in _SCALING.items()}}.items():
        if prefix + key in metadata:
            whole = name == "original_max_position_embeddings"
            values[name] = _typed(metadata[prefix + key], "int" if whole else "float", prefix + key, where)
    if "original_max_position_embeddings" in values:
        config["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    if values.get("factor") == 0.0:
        values["factor"] = 1.0
    values["rope_type"] = kind or ("linear" if values.get("factor", 1.0) != 1.0 else "none")
    if kind == "yarn":
        _hub_yarn(values)
    return values


def _hub_yarn(values: dict[str, Any]) -> None:
    if "attention_factor" in values:
        values["attention_factor"] *= 0.1 * math.log(max(values.get("factor", 1.0), 1.0)) + 1.0
    if "mscale_all_dim" in values:
        values["mscale_all_dim"] = values["mscale"] = float(str(np.float32(values["mscale_all_dim"] * 10)))


def _rope_factors(
    scaling: dict[str, Any], tensors: Mapping[str, TensorInfo], read: Callable[[str], Any], where: str
) -> dict[str, Any] | None:
    """`scaling` with the factors stored as tensors, one for each rotary frequency; all are divisors of the frequencies."""
    kind = scaling["rope_type"]
    if _FREQS in tensors:
        factors = _factors(_FREQS, tensors, read, where)
        if kind not in ("none", "linear"):
            return {**scaling, "factors": factors}
        linear = scaling.get("factor", 1.0) if kind == "linear" else 1.0
        return {"rope_type": "factors", "factors": [factor * linear for factor in factors]}
    if _LONG in tensors or _SHORT in tensors:
        for name in (_LONG, _SHORT):
            if name not in tensors:
                raise corrupt(where, f"has rotary factors for one length only: tensor '{name}' is missing")
        long, short = (_factors(name, tensors, read, where) for name in (_LONG, _SHORT))
        return {**scaling, "rope_type": "longrope", "long_factor": long, "short_factor": short}
    if kind == "longrope":
        raise corrupt(where, f"scales rotary positions by 'longrope' but lacks the tensors '{_LONG}' and '{_SHORT}'")
    return None if kind == "none" else scaling


def _factors(name: str, tensors: Mapping[str, TensorInfo], read: Callable[[str], Any], where: str) -> list[float]:
    info = tensors[name]
    if len(info.shape) != 1 or info.shape[0] > _MAX_FACTORS:
        raise corrupt(where, f"tensor '{name}' has shape {list(info.shape)}; a short list of factors is expected")
    values = np.asarray(read(name), np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise corrupt(where, f"tensor '{name}' holds factors that are not positive numbers")
    return [float(value) for value in values]
