"""Rotary frequencies: from a `rope` node's parameters to inverse frequencies and the factor on cos and sin.

Kinds: default; linear (positions divided); dynamic (NTK-aware base by length); ntk_alpha (fixed base); yarn (arXiv 2309.00071);
bands (long wavelengths divided, a smooth band between); longrope (arXiv 2402.13753, short and long factors); factors (stored
divisors); proportional (only the first share of the frequencies turns).

`dynamic` and `longrope` depend on how long the sequence may become. That length is fixed when a sequence starts, so neither
chunking nor batching can change an answer.

At position 100 000 the last bit of a frequency moves the angle by up to 0.006, so bits matter: every step is rounded to float32
where the frameworks that models are trained with round it, and powers are the float32 nearest to the true value. (Their
vectorised powers miss that by one unit in about one frequency of a hundred, which ones depends on the processor.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import SpecError

__all__ = ["frequencies", "rope_length"]

LARGEST = 1e15  # of any number in a config's rope scaling: nothing overflows on the way to a base
LARGEST_BASE = 1e30


def rope_length(params: Mapping[str, Any], length: int) -> int:
    """`length` where the frequencies depend on it, else 0: a key to share tables by."""
    kind = params["kind"]
    if kind == "longrope":
        return int(length > _original(params))
    return max(length, params["max_positions"] or 0) if kind == "dynamic" else 0


def frequencies(params: Mapping[str, Any], length: int) -> tuple[np.ndarray, float]:
    """(inverse frequencies, float32 [dim / 2]; factor on cos and sin) for a sequence that may reach `length` tokens."""
    dim = params["dim"]
    scaling: Mapping[str, Any] = params["scaling"] or {}
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    base = _base(params, scaling, length)
    if not base < LARGEST_BASE:
        raise SpecError(
            f"rope scaling makes a base of {base:.3g}", where="config", fix="check rope_theta and its scaling"
        )
    with np.errstate(all="ignore"):
        inverse, attention = _scaled(_power(base, exponent), params, scaling, length)
    if not (np.isfinite(inverse).all() and math.isfinite(attention)):
        raise SpecError("rope scaling makes frequencies that are no numbers", where="config", fix="check its numbers")
    return inverse.astype(np.float32), attention


def _scaled(
    powers: np.ndarray, params: Mapping[str, Any], scaling: Mapping[str, Any], length: int
) -> tuple[np.ndarray, float]:
    """The inverses of `powers`, as the kind changes them; factor on cos and sin."""
    dim, kind = params["dim"], params["kind"]
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
    return inverse, attention


def _power(base: Any, exponent: Any) -> np.ndarray:
    """The float32 `base` to `exponent`, in double precision, rounded to float32 once."""
    with np.errstate(over="ignore"):
        return np.asarray(np.power(np.float64(np.float32(base)), np.asarray(exponent, np.float64)), np.float32)


def _base(params: Mapping[str, Any], scaling: Mapping[str, Any], length: int) -> float:
    """theta, or the greater base that `dynamic` and `ntk_alpha` put in its place."""
    dim, kind, theta = params["dim"], params["kind"], _number(params, "theta")
    if kind not in ("dynamic", "ntk_alpha"):
        return theta
    if dim <= 2:
        raise SpecError(
            f"rope scaling '{kind}' needs more than 2 rotary dimensions", where="config", fix="check rope.dim"
        )
    if kind == "ntk_alpha":
        return float(theta * _number(scaling, "alpha") ** (dim / (dim - 2)))
    limit, factor = _number(params, "max_positions"), _number(scaling, "factor")
    if length <= limit:
        return theta
    stretch = np.float32(factor) * np.float32(length) / np.float32(limit) - np.float32(factor - 1)
    with np.errstate(over="ignore"):
        return float(np.float32(theta) * _power(stretch, dim / (dim - 2)))


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key) or default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST:
        raise SpecError(
            f"rope scaling needs a positive '{key}', it is {value!r:.40}",
            where="config",
            fix=f"give {key} in rope_scaling",
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
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < LARGEST:
        fix = "give original_max_position_embeddings"
        raise SpecError("rope scaling needs the original number of positions", where="config", fix=fix)
    return value


def _bands(inverse: np.ndarray, scaling: Mapping[str, Any], original: int) -> np.ndarray:
    factor = np.float32(_number(scaling, "factor"))
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if high < low:
        raise SpecError(
            f"high_freq_factor {high} must not be less than low_freq_factor {low}", where="config", fix="check them"
        )
    one = np.float32(1)
    band = np.float32(high - low) or one  # equal: one step, without a blend
    wavelength = one / inverse * np.float32(2 * math.pi)
    long = wavelength > np.float32(original / low)
    scaled = np.where(long, inverse / factor, inverse)
    smooth = (one / wavelength * np.float32(original) - np.float32(low)) / band
    blended = (one - smooth) * scaled / factor + smooth * scaled
    return np.where(~long & ~(wavelength < np.float32(original / high)), blended, scaled)


def _mscale(factor: float, m: float = 1.0) -> float:
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(powers: np.ndarray, params: Mapping[str, Any], scaling: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    dim, base, original = params["dim"], float(params["theta"]), _original(params)
    factor = _number(scaling, "factor", (params["max_positions"] or original) / original)
    attention = _mscale(factor)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention = _mscale(factor, _number(scaling, "mscale")) / _mscale(factor, _number(scaling, "mscale_all_dim"))
    attention = _number(scaling, "attention_factor", attention)
    if base <= 1:
        raise SpecError(f"yarn needs a theta greater than 1, it is {base}", where="config", fix="check rope_theta")

    def turns(rotations: float) -> float:
        return float(dim) * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = turns(_number(scaling, "beta_fast", 32)), turns(_number(scaling, "beta_slow", 1))
    if scaling.get("truncate", params["truncate"]):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = 1 - ramp
    return (1 / (np.float32(factor) * powers)) * (1 - keep) + (1 / powers) * keep, attention


def _longrope(
    powers: np.ndarray, params: Mapping[str, Any], scaling: Mapping[str, Any], length: int
) -> tuple[np.ndarray, float]:
    original = _original(params)
    long = length > original
    factors = _list(scaling, "long_factor" if long else "short_factor", params["dim"] // 2)
    factor = _number(scaling, "factor", (params["max_positions"] or original) / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    attention = _number(scaling, "attention_factor", attention)
    attention = _number(scaling, "long_mscale" if long else "short_mscale", attention)
    return 1 / (factors * powers), attention
