"""The native engine's kernels with a state, and those of experts, against NumPy, under every instruction set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from inferflow.kernels import native
from inferflow.kernels import reference as ref
from inferflow.kernels.recurrent import causal_conv, recurrence

from .native_ops import ISAS, NOTHING, Array, Steps, close, hostile, padded, run, tensor

NONE = native.NONE


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def bits(a: Array) -> Array:
    return np.ascontiguousarray(a).view(np.int32)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# ------------------------------------------------------------------------------------------------ convolution


def conv(isa: str, x: Array, w: Array, b: Array | None, state: Array, step: Steps) -> Array:
    out = np.empty_like(x)
    pointers = (w.ctypes.data, None if b is None else b.ctypes.data, state.ctypes.data)
    run(isa, "conv", native.ConvArgs(tensor(x), tensor(out), *pointers, w.shape[1]), step, [out, state])
    return out


@pytest.mark.parametrize(("channels", "kernel"), [(1, 2), (7, 4), (256, 3), (700, 4), (40, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_conv(isa: str, channels: int, kernel: int, biased: bool) -> None:
    counts, past, slots = [5, 1, 90, 2], [0, 3, 0, 17], [2, 0, 4, 1]
    x, w, state = normal(1, 98, channels), normal(2, channels, kernel), normal(3, 5, kernel - 1, channels)
    b = normal(4, channels) if biased else None
    before = state.copy()
    got = conv(isa, x, w, b, state, Steps(counts, past, slots))
    assert np.array_equal(state[3], before[3])
    starts = np.cumsum([0, *counts])
    for n, slot in enumerate(slots):
        old = before[slot] if past[n] else np.zeros_like(before[slot])
        y, new = causal_conv(x[starts[n] : starts[n + 1]], w, b, old)
        close(got[starts[n] : starts[n + 1]], y, 16, 2e-6 * kernel)
        assert np.array_equal(state[slot], new)


def test_conv_from_a_view(isa: str) -> None:
    x, w = normal(1, 9, 300), normal(2, 300, 4)
    states = [np.zeros((1, 3, 300), np.float32) for _ in range(2)]
    expected = conv(isa, x, w, None, states[0], Steps([9]))
    assert np.array_equal(bits(conv(isa, padded(x), w, None, states[1], Steps([9]))), bits(expected))
    assert np.array_equal(states[0], states[1])


# ------------------------------------------------------------------------------------------------ recurrence


def recur(isa: str, inputs: Sequence[Any], state: Array, step: Steps) -> Array:
    q, _, v, decay, _ = inputs
    out = np.empty(v.shape, np.float32)
    views = [NOTHING if a is None else tensor(a) for a in inputs]
    sizes = (v.shape[1], q.shape[1], q.shape[2], v.shape[2], decay.ndim == 3)
    run(isa, "recurrence", native.RecurrenceArgs(*views, tensor(out), state.ctypes.data, *sizes), step, [out, state])
    return out


def inputs_of(tokens: int, heads: int, groups: int, dk: int, dv: int, per_key: bool, delta: bool) -> Any:
    q, k, v = normal(1, tokens, groups, dk), normal(2, tokens, groups, dk), normal(3, tokens, heads, dv)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay = np.exp(-np.abs(normal(4, tokens, heads, dk) if per_key else normal(4, tokens, heads)))
    return q, k, v, decay, ref.ACTIVATION["sigmoid"](normal(5, tokens, heads)) if delta else None


SIZES = [(6, 2, 16, 64), (3, 3, 5, 7), (300, 1, 16, 1), (4, 1, 13, 1), (2, 2, 1, 1), (4, 2, 128, 40), (5, 1, 32, 3)]


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_recurrence(isa: str, sizes: tuple[int, int, int, int], per_key: bool, delta: bool) -> None:
    counts, past, slots = [4, 1, 7], [0, 5, 2], [1, 3, 0]
    inputs = inputs_of(12, *sizes, per_key, delta)
    state = normal(9, 4, sizes[0], sizes[2], sizes[3])
    before = state.copy()
    got = recur(isa, inputs, state, Steps(counts, past, slots))
    assert np.array_equal(state[2], before[2])
    starts = np.cumsum([0, *counts])
    for n, slot in enumerate(slots):
        old = before[slot] if past[n] else np.zeros_like(before[slot])
        part: Any = [None if a is None else a[starts[n] : starts[n + 1]] for a in inputs]
        y, new = recurrence(*part, old)
        close(got[starts[n] : starts[n + 1]], y, 16, 1e-5)
        close(state[slot], new, 16, 1e-5)
    views = tuple(None if a is None else padded(a) for a in inputs)
    again = before.copy()
    assert np.array_equal(bits(recur(isa, views, again, Steps(counts, past, slots))), bits(got))
    assert np.array_equal(bits(again), bits(state))


@pytest.mark.parametrize("op", ["conv", "recurrence"])
@pytest.mark.parametrize("chunks", [[1] * 20, [7, 7, 6], [19, 1]])
def test_chunks_and_company_change_no_bit(isa: str, op: str, chunks: list[int]) -> None:
    x, w = normal(1, 20, 270), normal(2, 270, 4)
    inputs = inputs_of(20, 6, 2, 16, 40, True, True)
    size = (3, 270) if op == "conv" else (6, 16, 40)

    def advance(rows: Any, state: Array, step: Steps) -> Array:
        if op == "conv":
            return conv(isa, x[rows], w, None, state, step)
        return recur(isa, tuple(a[rows] for a in inputs), state, step)

    whole, state = normal(7, 1, *size), normal(8, 3, *size)
    expected = advance(np.arange(20), whole, Steps([20]))
    for start, end in pairwise(np.cumsum([0, *chunks])):
        rows = np.concatenate([np.arange(3), np.arange(start, end)])  # beside another sequence
        y = advance(rows, state, Steps([3, end - start], [0, int(start)], [0, 2]))
        assert np.array_equal(bits(y[3:]), bits(expected[start:end]))
    assert np.array_equal(bits(state[2]), bits(whole[0]))


def test_nan_in_one_sequence_harms_no_other(isa: str) -> None:
    inputs = inputs_of(5, 4, 2, 16, 40, False, True)
    alone = recur(isa, tuple(a[:3] for a in inputs), np.zeros((2, 4, 16, 40), np.float32), Steps([3]))
    inputs[2][3:] = np.nan
    both = recur(isa, inputs, np.full((2, 4, 16, 40), np.nan, np.float32), Steps([3, 2]))
    assert np.array_equal(bits(both[:3]), bits(alone))
    assert np.isnan(both[3:]).all()


# ------------------------------------------------------------------------------------------------ experts


def route(isa: str, logits: Array, bias: Array | None, params: dict[str, Any]) -> tuple[Array, Array]:
    lead, k = logits.shape[:-1], params["top_k"]
    ids, weights = np.empty((*lead, k), np.int32), np.empty((*lead, k), np.float32)
    args = native.RouterArgs(
        tensor(logits), NOTHING if bias is None else tensor(bias, NONE), tensor(ids), tensor(weights),
        logits.shape[-1], k, native.SCORES.index(params["score"]), params["normalise"], params["groups"] or 0,
        params["top_groups"] or 0, params["group_score"] == "top2_sum", params["norm_min"], params["scale"],
        params["jitter"],
    )  # fmt: skip
    run(isa, "router", args, Steps([len(logits)]), [ids, weights])
    return ids, weights


def router_params(**changes: Any) -> dict[str, Any]:
    base = {"top_k": 4, "score": "softmax", "normalise": False, "norm_min": 1e-20, "scale": 1.0, "groups": None,
            "top_groups": None, "group_score": "max", "jitter": 0.01}  # fmt: skip
    return {**base, **changes}


ROUTERS = [
    router_params(),
    router_params(normalise=True, scale=2.5),
    router_params(score="sigmoid", normalise=True, groups=4, top_groups=2, group_score="top2_sum"),
    router_params(score="softmax", groups=8, top_groups=3),
    router_params(score="identity", groups=24, top_groups=1, group_score="top2_sum"),  # fewer experts than choices
    router_params(score="softmax_topk", top_k=24),
    router_params(score="sparsemixer", top_k=2),
    router_params(score="sparsemixer", top_k=3, jitter=0.3),
    router_params(score="identity", normalise=True, top_k=1),
]


@pytest.mark.parametrize("params", ROUTERS)
@pytest.mark.parametrize("biased", [False, True])
def test_router(isa: str, params: dict[str, Any], biased: bool) -> None:
    bias = normal(3, 24) if biased else None
    logits = normal(1, 200, 24)
    logits[100:] = np.round(logits[100:])  # ties
    ids, weights = route(isa, logits, bias, params)
    expected, wanted = ref.router(logits, bias, params)
    assert np.array_equal(ids, expected)
    # The definition subtracts where it normalises identity scores: their sum may be near zero.
    close(weights, wanted, 32, 1e-6 * float(np.nanmax(np.abs(wanted))))


@pytest.mark.parametrize("params", ROUTERS)
def test_router_of_hostile_logits(isa: str, params: dict[str, Any]) -> None:
    logits = hostile(np.random.default_rng(5), (300, 24))
    logits[0], logits[1], logits[2], logits[3] = np.nan, np.inf, -np.inf, 0
    ids, weights = route(isa, logits, None, params)
    expected, wanted = ref.router(logits, None, params)
    assert ids.min() >= 0
    assert ids.max() < 24
    assert np.array_equal(ids, expected)
    np.testing.assert_array_equal(np.isnan(weights), np.isnan(wanted))


def test_router_of_more_axes_and_alone(isa: str) -> None:
    logits = normal(1, 6, 5, 24)
    ids, weights = route(isa, padded(logits), None, ROUTERS[1])
    expected, wanted = ref.router(logits.reshape(30, 24), None, ROUTERS[1])
    assert np.array_equal(ids.reshape(30, 4), expected)
    close(weights.reshape(30, 4), wanted, 16)
    for t in range(6):
        alone, own = route(isa, logits[t : t + 1], None, ROUTERS[1])
        assert np.array_equal(alone[0], ids[t])
        assert np.array_equal(bits(own[0]), bits(weights[t]))


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 8, 1030), (3, 2, 17), (2, 3, 4, 9)])
@pytest.mark.parametrize("weighted", [False, True])
def test_combine(isa: str, shape: tuple[int, ...], weighted: bool) -> None:
    rng = np.random.default_rng(0)
    y, w = hostile(rng, shape), hostile(rng, shape[:-1]) if weighted else None
    expected = (y if w is None else y * w[..., None]).sum(-2)
    for source in (y, padded(y)):
        out = np.empty(expected.shape, np.float32)
        args = native.CombineArgs(tensor(source), NOTHING if w is None else tensor(w), tensor(out))
        run(isa, "combine", args, Steps([shape[0]]), [out])
        close(out, expected, 0)
