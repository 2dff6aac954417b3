"""NumPy, float32: the living definition of every primitive.

Each function takes what its primitive takes and gives what it gives, for the flat tokens of one step. Results do not depend on
what else is in the step: matrix products and attention take one token at a time, everything else works element by element or
along one token's axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from quant import hadamard

__all__ = [
    "ACTIVATION", "alibi_slopes", "attend", "linear", "norm", "quantise_activations", "rotate", "round_activations", "router",
    "sparsemixer",
]  # fmt: skip

Array = np.ndarray
BLOCK = 1 << 17  # weights in one block of a matrix product (512 KiB)


# ------------------------------------------------------------------------------------------------ matrix products


def matmul(x: Array, w: Array) -> Array:
    """x [n, in] · wᵀ [in, out]: for each row its own matrix-vector product, so that its bits do not depend on the others.

    Rows of `w` go in blocks that stay in the second-level cache while all of `x` passes: nearly as fast as one product of
    matrices at the sizes that matter here, and faster for a single row.
    """
    out = np.empty((len(x), len(w)), np.float32)
    columns = np.ascontiguousarray(x)[:, :, None]
    block = max(1, BLOCK // max(1, w.shape[1]))
    for n in range(0, len(w), block):
        out[:, n : n + block] = np.matmul(w[n : n + block], columns)[..., 0]
    return out


def linear(x: Array, w: Array, b: Array | None) -> Array:
    """x [..., in] -> [..., out]."""
    y = matmul(np.ascontiguousarray(x).reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], len(w))
    return y if b is None else y + b


def expert_linear(x: Array, ids: Array, w: Array, b: Array | None) -> Array:
    """x [tokens, in] or [tokens, topk, in], ids [tokens, topk], w [experts, out, in] -> [tokens, topk, out]."""
    tokens, topk = ids.shape
    if x.ndim == 2:
        x = np.broadcast_to(x[:, None, :], (tokens, topk, x.shape[-1]))
    out = np.empty((tokens, topk, w.shape[1]), np.float32)
    for e in np.unique(ids):
        t, k = np.nonzero(ids == e)
        out[t, k] = linear(x[t, k], w[e], None if b is None else b[e])
    return out


def quantise_activations(x: Array, group: int, rotation: int) -> tuple[Array, Array]:
    """(int8 [..., padded], scales [..., groups]) of x [..., in]: what integer matrices multiply.

    x is padded with zeros to whole groups and rotated by Hadamard blocks (0: not); a group's scale is max |x| / 127, and x
    times 127 / max |x| is rounded to the nearest integer, ties to even. A group that is not finite has the scale NaN.
    """
    x = hadamard(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % group)]), rotation)
    grouped = x.reshape(*x.shape[:-1], -1, group)
    with np.errstate(all="ignore"):
        most = np.abs(grouped).max(-1, keepdims=True)
        finite = np.isfinite(most)
        factor = np.where(finite & (most > 0), np.float32(127) / most, np.float32(0))
        q = np.where(finite, np.rint(grouped * factor), 0).astype(np.int8)
    scales = np.where(finite, most / np.float32(127), np.float32(np.nan))
    return q.reshape(x.shape), scales[..., 0]


def round_activations(x: Array, group: int, rotation: int) -> Array:
    """x [..., in] as an integer matrix sees it: quantised and widened again, in the original basis."""
    q, scales = quantise_activations(x, group, rotation)
    wide = (q.reshape(*scales.shape, group) * scales[..., None]).reshape(q.shape)
    return hadamard(wide, rotation)[..., : x.shape[-1]]


# ------------------------------------------------------------------------------------------------ element-wise


def _erf(x: Array) -> Array:
    """The error function to about 1e-12, by its series near zero and a continued fraction far out."""
    z = np.abs(x.astype(np.float64))
    near = z < 2.5
    s = np.where(near, z, 0.0)
    term, total = s.copy(), s.copy()
    for n in range(1, 40):
        term = term * (-s * s) / n
        total = total + term / (2 * n + 1)
    far = np.where(near, 3.0, np.minimum(z, 6.0))
    fraction = np.zeros_like(far)
    for n in range(40, 0, -1):
        fraction = (n / 2) / (far + fraction)
    tail = 1 - np.exp(-far * far) / (math.sqrt(math.pi) * (far + fraction))
    return np.copysign(np.where(near, total * 2 / math.sqrt(math.pi), tail), x)


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _gelu_tanh(x: Array) -> Array:
    return (
        np.float32(0.5) * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)))
    )


ACTIVATION: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "silu": lambda x: x * _sigmoid(x),
        "gelu": lambda x: (0.5 * x * (1 + _erf(x / math.sqrt(2)))).astype(np.float32),
        "gelu_tanh": _gelu_tanh,
        "quick_gelu": lambda x: x * _sigmoid(np.float32(1.702) * x),
        "relu": lambda x: np.maximum(x, 0),
        "relu2": lambda x: np.square(np.maximum(x, 0)),
        "sigmoid": _sigmoid,
        "tanh": np.tanh,
        "softplus": lambda x: np.logaddexp(np.float32(0), x),
        "identity": lambda x: x,
        "exp": np.exp,
        "log": np.log,
        "sqrt": np.sqrt,
        "abs": np.abs,
        "floor": np.floor,
        "ceil": np.ceil,
        "sin": lambda x: np.sin(x.astype(np.float64)).astype(np.float32),
        "cos": lambda x: np.cos(x.astype(np.float64)).astype(np.float32),
    }
)

BINARY: Mapping[str, Callable[[Any, Any], Array]] = MappingProxyType(
    {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "pow": np.power,
        "min": np.minimum,
        "max": np.maximum,
    }
)


def xielu(x: Array, alpha_p: Array, alpha_n: Array, beta: float, eps: float) -> Array:
    """For x > 0, αp·x² + β·x; else αn·(e^min(x, eps) − 1 − x) + β·x, with αp = softplus(stored) and
    αn = β + softplus(stored)."""
    p = np.logaddexp(np.float32(0), alpha_p)
    n = np.float32(beta) + np.logaddexp(np.float32(0), alpha_n)
    b = np.float32(beta)
    return np.where(x > 0, p * x * x + b * x, (np.expm1(np.minimum(x, np.float32(eps))) - x) * n + b * x)


def norm(x: Array, w: Array | None, b: Array | None, params: Mapping[str, Any]) -> Array:
    """Over the last axis. ``l2`` divides by the length (at least eps), the others by the root of the mean square + eps."""
    eps = np.float32(params["eps"])
    if params["kind"] == "layer":
        x = x - x.mean(-1, keepdims=True)
    square = x * x
    if params["kind"] == "l2":
        y = x / np.maximum(np.sqrt(square.sum(-1, keepdims=True)), eps)
    else:
        y = x / np.sqrt(square.mean(-1, keepdims=True) + eps)
    if w is not None:
        y = y * (1 + w if params["add_one"] else w)
    return y if b is None else y + b


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ------------------------------------------------------------------------------------------------ attention


def rotate(x: Array, positions: Array, inverse: Array, factor: float, pairing: str) -> Array:
    """x [tokens, heads, dim]; the first 2·len(inverse) channels turn by position·inverse (angles in float32, as they were
    in training)."""
    angle = (positions.astype(np.float32)[:, None] * inverse).astype(np.float64)
    cos, sin = (np.float32(factor) * f(angle).astype(np.float32) for f in (np.cos, np.sin))
    while cos.ndim < x.ndim:
        cos, sin = cos[:, None], sin[:, None]
    n = len(inverse)
    out = x.copy()
    if pairing == "half":
        a, b = x[..., :n], x[..., n : 2 * n]
        out[..., :n], out[..., n : 2 * n] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]
        out[..., 0 : 2 * n : 2], out[..., 1 : 2 * n : 2] = a * cos - b * sin, b * cos + a * sin
    return out


def alibi_slopes(heads: int, greatest: float) -> Array:
    """2^(-greatest·k/n) for the nearest power of two n ≤ heads; the odd ones of 2n fill up (arXiv 2108.12409)."""
    n = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-greatest * (k + 1) / n) for k in range(n)]
    slopes += [2 ** (-greatest * (k + 1) / (2 * n)) for k in range(0, 2 * (heads - n), 2)]
    return np.asarray(slopes, np.float32)


def _bfloat16(x: Array) -> Array:
    """float32, rounded to the nearest bfloat16 (ties to even)."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def alibi_bias(heads: int, first: int, keys: int, greatest: float, rounded: bool) -> Array:
    """[heads, keys]: slope × distance to the last of `keys` keys, the first of which is at position `first`.

    `rounded`: slope, key position and their product are bfloat16 numbers. The softmax does not see a constant, so this is
    slope × distance but for the rounding.
    """
    slopes = alibi_slopes(heads, greatest)[:, None]
    if not rounded:
        return slopes * np.arange(1 - keys, 1, dtype=np.float32)
    at = np.arange(first, first + keys, dtype=np.float32)
    return _bfloat16(_bfloat16(slopes) * _bfloat16(at))


def attend(q: Array, k: Array, v: Array, first: int, sinks: Array | None, params: Mapping[str, Any]) -> Array:
    """One query token q [heads, dim] over keys k [n, kv, dim], v [n, kv, vdim], the last of which is its own -> [heads, vdim].

    `first` is the position of k[0]. The keys are already those that window and chunk allow.
    """
    heads, kv = len(q), k.shape[1]
    group = q.reshape(kv, heads // kv, -1)
    scores = group @ np.ascontiguousarray(k.transpose(1, 2, 0)) * np.float32(params["scale"])
    if params["softcap"] is not None:
        cap = np.float32(params["softcap"])
        scores = cap * np.tanh(scores / cap)
    if params["alibi"] is not None:
        bias = alibi_bias(heads, first, len(k), params["alibi"], params["alibi_dtype"] == "bfloat16")
        scores = scores + (bias * np.float32(params["alibi_scale"])).reshape(kv, -1, len(k))
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks.reshape(kv, -1, 1))
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.reshape(kv, -1, 1) - top)
    out = (e / total) @ np.ascontiguousarray(v.transpose(1, 0, 2))
    return out.reshape(heads, -1)


# ------------------------------------------------------------------------------------------------ experts


def _top(scores: Array, k: int) -> Array:
    """Indices of the k greatest of the last axis, greatest first; ties go to the lower index."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def router(logits: Array, bias: Array | None, params: Mapping[str, Any]) -> tuple[Array, Array]:
    """(ids int64 [tokens, topk], weights [tokens, topk])."""
    k, score = params["top_k"], params["score"]
    if score == "sparsemixer":
        return sparsemixer(logits, k, params["jitter"])
    scores = {"softmax": softmax, "sigmoid": _sigmoid}.get(score, ACTIVATION["identity"])(logits)
    choice = scores if bias is None else scores + bias
    if params["groups"] is not None:
        choice = _grouped(choice, params)
    ids = _top(choice, k)
    weights = np.take_along_axis(scores, ids, -1)
    if score == "softmax_topk":
        weights = softmax(weights)
    if params["normalise"]:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), np.float32(params["norm_min"]))
    return ids, weights * np.float32(params["scale"])


def _grouped(choice: Array, params: Mapping[str, Any]) -> Array:
    """Only experts of the best groups can be chosen."""
    groups = choice.reshape(len(choice), params["groups"], -1)
    if params["group_score"] == "max":
        best = groups.max(-1)
    else:
        best = np.sort(groups, -1)[..., -2:].sum(-1)
    keep = np.zeros(best.shape, bool)
    np.put_along_axis(keep, _top(best, params["top_groups"]), True, -1)
    return np.where(keep[..., None], groups, -np.inf).reshape(choice.shape)


def sparsemixer(logits: Array, k: int, jitter: float) -> tuple[Array, Array]:
    """Each choice in turn: the greatest logit, weighted by a softmax over those within `jitter` of it; then it is masked
    (arXiv 2409.12136)."""
    scores = logits
    ids, weights = [], []
    for _ in range(k):
        best = _top(scores, 1)
        peak = np.take_along_axis(scores, best, -1)
        scale = np.maximum(np.abs(logits), peak)
        near = np.where((peak - logits) / scale > 2 * np.float32(jitter), -np.inf, scores)
        ids.append(best)
        weights.append(np.take_along_axis(softmax(near), best, -1))
        scores = scores.copy()
        np.put_along_axis(scores, best, -np.inf, -1)
    return np.concatenate(ids, -1), np.concatenate(weights, -1)
