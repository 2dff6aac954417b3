"""A safetensors checkpoint written again as GGUF, the way the format's own converter writes it.

Tensor names come from the `gguf` package's tables; what a converter changes (permuted heads, folded ones, unfused, fused
and stacked matrices, the metadata keys) is restated here in NumPy, one function a change, so that a spec is compared
with the format and not with itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]
Config = dict[str, Any]
Change = Callable[[Tensors, Config], Tensors]
Pairs = Iterator[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Twin:
    """A row of the parity table (`row`) and how it becomes a GGUF of architecture `arch`. `changes` run one after
    another; `metadata` gives the writer's ``add_…`` calls beside the common ones (None takes one away)."""

    row: str
    arch: str
    changes: tuple[Change, ...] = ()
    metadata: Callable[[Config], dict[str, Any]] = field(default=lambda c: {})
    quantised: bool = False


def convert(twin: Twin, folder: Path, out: Path) -> Path:
    """Write `folder`'s model as the GGUF file `out`."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    for change in twin.changes:
        tensors = change(tensors, config)
    writer = gguf.GGUFWriter(out, twin.arch)
    for name, value in {**common(config), **twin.metadata(config)}.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    names = tensor_names(twin.arch, first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    for name, array in tensors.items():
        add(writer, names(name), np.ascontiguousarray(array, dtype=np.float32), twin.quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def tensor_names(arch: str, layers: int) -> Callable[[str], str]:
    known = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    table = gguf.get_tensor_name_map(known, layers)

    def name(key: str) -> str:
        found = table.get_name(key, try_suffixes=(".weight", ".bias"))
        if found is None and re.fullmatch(r"(blk\.\d+\.\w+|rope_\w+)\.(weight|bias)", key):
            return key  # a change has named it already
        assert found is not None, f"the converter of {arch} does not know '{key}'"
        return found

    return name


def add(writer: Any, name: str, array: np.ndarray, quantised: bool) -> None:
    if quantised and array.ndim >= 2 and array.shape[-1] % 32 == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, array)


# ------------------------------------------------------------------------------------------------ metadata


def first(config: Config, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def common(c: Config) -> dict[str, Any]:
    """What a converter writes for every text model, as far as its config has it."""
    rope = c.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    out = {
        "block_count": first(c, "num_hidden_layers", "n_layer", "n_layers"),
        "context_length": first(c, "max_position_embeddings", "n_positions", "max_seq_len"),
        "embedding_length": first(c, "hidden_size", "n_embd", "d_model"),
        "feed_forward_length": first(c, "intermediate_size", "n_inner"),
        "head_count": first(c, "num_attention_heads", "n_head", "n_heads"),
        "head_count_kv": first(c, "num_key_value_heads"),
        "rope_freq_base": first({**c, **full}, "rope_theta"),
        "layer_norm_rms_eps": first(c, "rms_norm_eps"),
        "layer_norm_eps": first(c, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        "expert_count": first(c, "num_local_experts", "num_experts"),
        "expert_used_count": first(c, "num_experts_per_tok"),
        "key_length": c.get("head_dim"),
        "value_length": c.get("head_dim"),
        "vocab_size": c["vocab_size"],
    }
    if "sliding_attention" in rope:
        out["rope_freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    if full.get("rope_type") == "linear":
        out |= {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": full["factor"]}
    return out | (yarn(full) if full.get("rope_type") == "yarn" else {})


def yarn(rope: Config) -> dict[str, Any]:
    names = {"beta_fast": "rope_scaling_yarn_beta_fast", "beta_slow": "rope_scaling_yarn_beta_slow"}
    return {
        "rope_scaling_type": gguf.RopeScalingType.YARN,
        "rope_scaling_factor": rope["factor"],
        "rope_scaling_orig_ctx_len": rope["original_max_position_embeddings"],
        **{call: rope[key] for key, call in names.items() if key in rope},
    }


def rotary_share(c: Config) -> dict[str, Any]:
    share = first({**c, **(c.get("rope_parameters") or {})}, "partial_rotary_factor", "rotary_pct")
    width = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return {"rope_dimension_count": int(width * share)}


# ------------------------------------------------------------------------------------------------ changes


def each(change: Callable[[str, np.ndarray, Config], Pairs]) -> Change:
    """A change of one tensor at a time."""

    def run(tensors: Tensors, c: Config) -> Tensors:
        return {new: a for name, array in tensors.items() for new, a in change(name, array, c)}

    return run


def renamed(*pairs: tuple[str, str]) -> Change:
    """Regular expressions on the names."""

    def one(name: str, array: np.ndarray, c: Config) -> Pairs:
        for pattern, new in pairs:
            name = re.sub(pattern, new, name)
        yield name, array

    return each(one)


def without(pattern: str) -> Change:
    return lambda tensors, c: {name: a for name, a in tensors.items() if not re.search(pattern, name)}


@each
def permuted(name: str, a: np.ndarray, c: Config) -> Pairs:
    """Rows of q and k from halves to pairs; of the biases too."""
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}
    n = next((count for part, count in heads.items() if f".{part}." in name), None)
    yield name, a if n is None else a.reshape(n, 2, -1, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)


@each
def one_added(name: str, a: np.ndarray, c: Config) -> Pairs:
    yield name, a + 1 if name.endswith("norm.weight") else a


def band_factors(tensors: Tensors, c: Config) -> Tensors:
    """The divisors of the frequencies, as a tensor in place of metadata."""
    rope = c["rope_parameters"]
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    wave = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope["original_max_position_embeddings"]
    smooth = (old / wave - low) / (high - low)
    out = np.where(wave < old / high, 1.0, np.where(wave > old / low, factor, 1 / ((1 - smooth) / factor + smooth)))
    return {**tensors, "rope_freqs.weight": out}


def long_factors(tensors: Tensors, c: Config) -> Tensors:
    rope = c["rope_parameters"]
    names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
    return {**tensors, **{name: np.asarray(rope[key]) for name, key in names.items()}}


def stacked(pattern: str, new: str) -> Change:
    """Tensors that differ in a number (the group of `pattern`), as one with a new first axis."""

    def run(tensors: Tensors, c: Config) -> Tensors:
        out: Tensors = {}
        groups: dict[str, list[tuple[int, np.ndarray]]] = {}
        for name, array in tensors.items():
            hit = re.search(pattern, name)
            if hit is None:
                out[name] = array
            else:
                groups.setdefault(re.sub(pattern, new, name), []).append((int(hit[1]), array))
        for name, items in groups.items():
            out[name] = np.stack([array for _, array in sorted(items, key=lambda item: item[0])])
        return out

    return run


EXPERTS = stacked(r"experts\.(\d+)\.", "experts.")
HEAD_NORMS = stacked(r"norms\.(\d+)\.", "")


def transposed(pattern: str) -> Change:
    """Matrices stored [in, out]."""

    def one(name: str, a: np.ndarray, c: Config) -> Pairs:
        yield name, a.swapaxes(-1, -2) if re.search(pattern, name) else a

    return each(one)


def regrouped(groups: Callable[[Config], int], parts: Callable[[Config], tuple[int, int, int]]) -> Change:
    """query_key_value from [q … q, k, v] of each group of heads to all q, all k, all v."""

    def one(name: str, a: np.ndarray, c: Config) -> Pairs:
        if ".query_key_value." in name:
            sizes = parts(c)
            cut = a.reshape(groups(c), sum(sizes), -1, *a.shape[1:])
            pieces = np.split(cut, np.cumsum(sizes)[:-1], axis=1)
            a = np.concatenate([piece.reshape(-1, *a.shape[1:]) for piece in pieces])
        yield name, a

    return each(one)


@each
def latent(name: str, a: np.ndarray, c: Config) -> Pairs:
    """kv_b in two, the first transposed."""
    if "kv_b_proj" not in name:
        yield name, a
        return
    nope, heads = c["qk_nope_head_dim"], c["num_attention_heads"]
    both = a.reshape(heads, nope + c["v_head_dim"], a.shape[-1])
    yield name.replace("kv_b_proj", "k_b_proj"), both[:, :nope].swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), both[:, nope:]


@each
def whole_latent(name: str, a: np.ndarray, c: Config) -> Pairs:
    """kv_b in one, as files before 2025 have it."""
    yield re.sub(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj", r"blk.\1.attn_kv_b", name), a


@each
def levelled(name: str, a: np.ndarray, c: Config) -> Pairs:
    """Experts one above the other, [(e, ff), in], as stacks."""
    if "experts.mlp." in name:
        experts = c["ffn_config"]
        a = a.reshape(experts["moe_num_experts"], experts["ffn_hidden_size"], -1)
        yield name + ".weight", a.swapaxes(1, 2) if name.endswith("w2") else a
    else:
        yield name, a


@each
def parted(name: str, a: np.ndarray, c: Config) -> Pairs:
    """Experts stored [e, in, gate ‖ up] and [e, in, out], as three stacks."""
    if name.endswith("experts.gate_up_proj"):
        for part, piece in zip(("gate_proj", "up_proj"), np.split(a, 2, axis=-1), strict=True):
            yield name.replace("gate_up_proj", part) + ".weight", piece.swapaxes(1, 2)
    elif name.endswith("experts.down_proj"):
        yield name + ".weight", a.swapaxes(1, 2)
    else:
        yield name, a


@each
def unwoven(name: str, a: np.ndarray, c: Config) -> Pairs:
    """Experts stored [e, in, out], the rows of gate and up alternating, as two stacks."""
    if "gate_up_proj" in name:
        a = a if name.endswith("_bias") else a.swapaxes(-1, -2)
        end = ".bias" if name.endswith("_bias") else ".weight"
        stem = re.sub(r"gate_up_proj.*$", "", name)
        yield stem + "gate_proj" + end, a[:, ::2]
        yield stem + "up_proj" + end, a[:, 1::2]
    elif name.endswith("down_proj_bias"):
        yield name.replace("down_proj_bias", "down_proj.bias"), a
    elif name.endswith("experts.down_proj"):
        yield name + ".weight", a.swapaxes(-1, -2)
    else:
        yield (name + ".weight" if name.endswith(".sinks") else name), a


@each
def halves(name: str, a: np.ndarray, c: Config) -> Pairs:
    """input_linear [e, gate ‖ up, in] of experts as two."""
    if "input_linear" in name:
        role = "shexp" if "shared_mlp" in name else "exps"
        layer = re.search(r"layers\.(\d+)", name)
        assert layer is not None
        for part, piece in zip(("gate", "up"), np.split(a, 2, axis=-2), strict=True):
            yield f"blk.{layer[1]}.ffn_{part}_{role}.weight", piece
    else:
        yield name, a


def alphas(tensors: Tensors, c: Config) -> Tensors:
    """The learned alphas of an activation, as lists for the metadata."""
    layers = range(c["num_hidden_layers"])
    for key in ("alpha_p", "alpha_n"):
        c[key] = [float(tensors[f"model.layers.{i}.mlp.act_fn.{key}"].item()) for i in layers]
    return without("act_fn")(tensors, c)
