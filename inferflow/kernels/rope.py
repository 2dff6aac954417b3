"""Rotary frequencies: from a `rope` node's parameters to inverse frequencies and the factor on cos and sin.

Kinds: default; linear (positions divided); dynamic (NTK-aware base by length); ntk_alpha (fixed base); yarn (arXiv 2309.00071);
bands (long wavelengths divided, a smooth band between); longrope (arXiv 2402.13753, short and long factors); factors (stored
divisors); proportional (only the first share of the frequencies turns).

`dynamic` and `longrope` depend on how long the sequence may become. That length is fixed when a sequence starts, so neither
chunking nor batching can change an answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import SpecError

__all__ = ["frequencies", "rope_length"]


def rope_length(params: Mapping[str, Any], length: int) -> int:
    """`length` where the frequencies depend on it, else 0: a key to share tables by."""
    kind = params["kind"]
    if kind == "longrope":
        return int(length > _original(params))
    return max(length, params["max_positions"] or 0) if kind == "dynamic" else 0


def frequencies(params: Mapping[str, Any], length: int) -> tuple[np.ndarray, float]:
    """(inverse frequencies, float32 [dim / 2]; factor on cos and sin) for a sequence that may reach `length` tokens."""
    dim, theta = params["dim"], float(params["theta"])
    scaling: Mapping[str, Any] = params["scaling"] or {}
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    kind = params["kind"]
    if kind == "dynamic":
        limit = params["max_positions"]
        factor = _number(scaling, "factor")
        theta *= (factor * max(length, limit) / limit - (factor - 1)) ** (dim / (dim - 2))
    elif kind == "ntk_alpha":
        theta *= _number(scaling, "alpha") ** (dim / (dim - 2))
    powers = np.power(theta, exponent.astype(np.float64)).astype(np.float32)
    inverse = np.float32(1) / powers
    attention = 1.0
    if kind == "linear":
        inverse = inverse / np.float32(_number(scaling, "factor"))
    elif kind == "bands":
        inverse = _bands(inverse, scaling, _original(params))
    elif kind == "yarn":
        inverse, attention = _yarn(powers, params, scaling)
    elif kind == "longrope":
        inverse, attention = _longrope(powers, params, scaling, length)
    elif kind == "factors":
        inverse = inverse / _list(scaling, "factors", dim // 2)
    elif kind == "proportional":
        turning = int(_number(scaling, "partial_rotary_factor", 1.0) * dim // 2)
        inverse = np.where(
            np.arange(dim // 2) < turning, inverse / np.float32(_number(scaling, "factor", 1.0)), np.float32(0)
        )
    return inverse.astype(np.float32), attention


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise SpecError(
            f"rope scaling needs a positive '{key}', it is {value!r}", where="config", fix=f"give {key} in rope_scaling"
        )
    return float(value)


def _list(scaling: Mapping[str, Any], key: str, size: int) -> np.ndarray:
    value = scaling.get(key)
    if (
        not isinstance(value, list | tuple)
        or len(value) != size
        or not all(isinstance(v, int | float) and v > 0 for v in value)
    ):
        got = f"{len(value)} entries" if isinstance(value, list | tuple) else repr(value)
        raise SpecError(f"rope scaling needs '{key}' with {size} positive numbers, it has {got}", where="config")
    return np.asarray(value, dtype=np.float32)


def _original(params: Mapping[str, Any]) -> int:
    """The context the model was trained on, before it was stretched."""
    scaling = params["scaling"] or {}
    value = params["original"] or scaling.get("original_max_position_embeddings") or params["max_positions"]
    if not isinstance(value, int) or value <= 0:
        fix = "give original_max_position_embeddings"
        raise SpecError("rope scaling needs the original number of positions", where="config", fix=fix)
    return value


def _bands(inverse: np.ndarray, scaling: Mapping[str, Any], original: int) -> np.ndarray:
    factor = np.float32(_number(scaling, "factor"))
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    wavelength = np.float32(2 * math.pi) / inverse
    scaled = np.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return np.where(between, blended, scaled)


def _mscale(factor: float, m: float = 1.0) -> float:
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(powers: np.ndarray, params: Mapping[str, Any], scaling: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    dim, base, original = params["dim"], float(params["theta"]), _original(params)
    factor = scaling.get("factor") or (params["max_positions"] or original) / original
    m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = _mscale(factor, m) / _mscale(factor, m_all) if m and m_all else _mscale(factor)

    def turns(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = turns(scaling.get("beta_fast") or 32), turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", params["truncate"]):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = 1 - ramp
    return (1 / (np.float32(factor) * powers)) * (1 - keep) + (1 / powers) * keep, float(attention)


def _longrope(
    powers: np.ndarray, params: Mapping[str, Any], scaling: Mapping[str, Any], length: int
) -> tuple[np.ndarray, float]:
    original = _original(params)
    long = length > original
    factors = _list(scaling, "long_factor" if long else "short_factor", params["dim"] // 2)
    attention = scaling.get("long_mscale" if long else "short_mscale") or scaling.get("attention_factor")
    if attention is None:
        factor = scaling.get("factor") or (params["max_positions"] or original) / original
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1 / (factors * powers), float(attention)
