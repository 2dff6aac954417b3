"""The native engine's element-wise, norm, gate and rotary kernels against NumPy, under every instruction set."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from inferflow.kernels import native
from inferflow.kernels import reference as ref

from .native_ops import ISAS, Array, Steps, close, hostile, padded, run, tensor

NONE, ROWS = native.NONE, native.ROWS
SHAPES = [(1, 1), (3, 7), (5, 16), (2, 3, 33), (1, 5000), (70, 129), (3, 1, 4), (4,), (2, 4, 3, 5)]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def bits(a: Array) -> Array:
    return np.ascontiguousarray(a).view(np.int32)


def unary(isa: str, kind: str, x: Array, a: float = 0.0, out: Array | None = None) -> Array:
    out = np.empty_like(x) if out is None else out
    run(isa, "unary", native.UnaryArgs(tensor(x), tensor(out), native.UNARY.index(kind), a), Steps([len(x)]), [out])
    return out


# ------------------------------------------------------------------------------------------------ one number


@pytest.mark.parametrize("kind", native.UNARY[:18])
def test_unary(isa: str, kind: str) -> None:
    grid = np.concatenate([np.linspace(-20, 20, 4001), np.logspace(-44, 38, 999), -np.logspace(-44, 38, 999)])
    for x in (*(hostile(rng(n), shape) for n, shape in enumerate(SHAPES)), grid.astype(np.float32)):
        expected = ref.ACTIVATION[kind](x)
        # Definitions that cancel (1 + tanh, 1 + erf) are only as good as their terms; gelu's tail as x / √2, rounded.
        ulps, absolute = {"gelu": (32, 2e-11), "gelu_tanh": (8, 3e-7)}.get(kind, (8, 1e-37))
        close(unary(isa, kind, x), expected, ulps, absolute)


@pytest.mark.parametrize("kind", ["silu", "tanh", "exp", "gelu"])
def test_unary_of_any_view_in_place_and_alone_gives_the_same_bits(isa: str, kind: str) -> None:
    x = hostile(rng(), (9, 5, 37))
    expected = unary(isa, kind, x)
    assert np.array_equal(bits(unary(isa, kind, padded(x))), bits(expected))
    assert np.array_equal(bits(unary(isa, kind, x.copy(), out=padded(x))), bits(expected))
    for t in range(len(x)):
        assert np.array_equal(bits(unary(isa, kind, x[t : t + 1])), bits(expected[t : t + 1]))
    own = x.copy()
    args = native.UnaryArgs(tensor(own), tensor(own), native.UNARY.index(kind), 0)
    run(isa, "unary", args, Steps([len(x)]), [own])
    assert np.array_equal(bits(own), bits(expected))


def test_clamp_and_softcap(isa: str) -> None:
    x = hostile(rng(), (13, 77), 50)
    close(unary(isa, "clamp", x, 7.5), np.clip(x, np.float32(-7.5), np.float32(7.5)), 0)
    close(unary(isa, "softcap", x, 30.0), np.float32(30) * np.tanh(x / np.float32(30)), 8, 1e-37)


@pytest.mark.parametrize("eps", [-1e-6, -0.5])
def test_xielu(isa: str, eps: float) -> None:
    for x in (hostile(rng(), (7, 131)), np.linspace(-2, 2, 5001, dtype=np.float32)[:, None]):
        p, n, out = np.asarray([0.7], np.float32), np.asarray([-1.3], np.float32), np.empty_like(x)
        args = native.XieluArgs(tensor(x), tensor(p, NONE), tensor(n, NONE), tensor(out), 0.5, eps)
        run(isa, "xielu", args, Steps([len(x)]), [out])
        close(out, ref.xielu(x, p, n, 0.5, eps), 16, 5e-7)  # NumPy rounds as the processor does


# ------------------------------------------------------------------------------------------------ two numbers


def binary(isa: str, kind: str, a: Array, b: Array, shape: tuple[int, ...], leads: tuple[int, int] = (0, 0)) -> Array:
    out = np.empty(shape, np.float32)
    args = native.BinaryArgs(tensor(a, leads[0]), tensor(b, leads[1]), tensor(out), native.BINARY.index(kind))
    run(isa, "binary", args, Steps([shape[0]]), [out])
    return out


@pytest.mark.parametrize("kind", native.BINARY)
def test_binary(isa: str, kind: str) -> None:
    for n, shape in enumerate(SHAPES):
        a, b = hostile(rng(n), shape), hostile(rng(n + 99), shape)
        expected = ref.BINARY[kind](a, b)
        close(binary(isa, kind, a, b, shape), expected, 1 if kind == "pow" else 0, 2e-45 if kind == "pow" else 0)
        close(
            binary(isa, kind, padded(a), b, shape), expected, 1 if kind == "pow" else 0, 2e-45 if kind == "pow" else 0
        )


def test_binary_broadcasts(isa: str) -> None:
    x = hostile(rng(), (6, 4, 35))
    for small in ((6, 4, 1), (6, 1, 35), (1, 1, 35), (1, 4, 1), (1, 1, 1)):
        y = hostile(rng(1), small)
        full = np.broadcast_to(y, x.shape)
        assert np.array_equal(binary(isa, "mul", x, full, x.shape), x * full, equal_nan=True)
        assert np.array_equal(binary(isa, "sub", full, x, x.shape), full - x, equal_nan=True)
    constant = hostile(rng(2), (4, 35))
    assert np.array_equal(binary(isa, "add", x, constant, x.shape, (0, NONE)), x + constant, equal_nan=True)
    number = np.broadcast_to(np.float32(3), (4, 35))
    assert np.array_equal(binary(isa, "div", number, x, x.shape, (NONE, 0)), 3 / x, equal_nan=True)


def test_sizes_of_one_are_broadcast(isa: str) -> None:
    x, y, out = hostile(rng(), (6, 4, 35)), hostile(rng(1), (6, 4, 1)), np.empty((6, 4, 35), np.float32)
    run(isa, "binary", native.BinaryArgs(tensor(x), tensor(y), tensor(out), 2), Steps([6]), [out])
    assert np.array_equal(out, x * y, equal_nan=True)
    run(isa, "copy", native.CopyArgs(tensor(y), tensor(out)), Steps([6]), [out])
    assert np.array_equal(out, np.broadcast_to(y, x.shape), equal_nan=True)


def test_copy_keeps_every_bit(isa: str) -> None:
    x = rng().integers(-(2**31), 2**31, (5, 3, 50), dtype=np.int32)
    for source in (x, padded(x.view(np.float32)).view(np.int32), x[:, :, ::2]):
        out = np.empty(source.shape, np.int32)
        run(isa, "copy", native.CopyArgs(tensor(source), tensor(out)), Steps([5]), [out])
        assert np.array_equal(out, source)


@pytest.mark.parametrize(
    ("a", "b"), [((3,), (5,)), ((3, 4), (5,)), ((3, 4), (3, 5)), ((3, 2, 4), (3, 2, 9)), ((3, 2, 4), (9,))]
)
def test_outer(isa: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = hostile(rng(), a), hostile(rng(1), b)
    expected = x[..., :, None] * y[..., None, :] if len(a) > 1 or len(b) > 1 else x[:, None] * y
    out = np.empty(expected.shape, np.float32)
    args = native.OuterArgs(tensor(x), tensor(y, NONE if len(b) == 1 else 0), tensor(out))
    run(isa, "outer", args, Steps([3]), [out])
    assert np.array_equal(out, expected, equal_nan=True)


def test_concat(isa: str) -> None:
    tokens = 37
    parts = [hostile(rng(n), (tokens, 4, width)) for n, width in enumerate((64, 1, 7, 130))]
    parts.append(np.broadcast_to(hostile(rng(9), (tokens, 1, 5)), (tokens, 4, 5)))
    parts.append(parts[0][:, :, 3:40])
    single = hostile(rng(10), (tokens, 1, 6))  # broadcast by its size of one
    expected = np.concatenate([*parts, np.broadcast_to(single, (tokens, 4, 6))], -1)
    out = np.empty_like(expected)
    views = native.array(native.Tensor, [tensor(p) for p in (*parts, single)])
    run(isa, "concat", native.ConcatArgs(tensor(out), len(parts) + 1, views), Steps([tokens]), [out])
    assert np.array_equal(bits(out), bits(expected))


def test_select_and_positions(isa: str) -> None:
    x, rows = hostile(rng(), (9, 3, 50)), [8, 0, 8, 4]
    out = np.empty((4, 3, 50), np.float32)
    run(isa, "select", native.SelectArgs(tensor(x), tensor(out, ROWS)), Steps([9], rows=rows), [out])
    assert np.array_equal(bits(out), bits(x[rows]))
    step = Steps([3, 2], past=[100, 2**24 - 1])
    at = np.empty(5, np.float32)
    run(isa, "positions", native.PositionsArgs(tensor(at)), step, [at])
    assert at.tolist() == [100, 101, 102, 2**24 - 1, 2**24]


# ------------------------------------------------------------------------------------------------ norms, reductions


def norm(isa: str, kind: str, x: Array, w: Array | None, b: Array | None, eps: float, per_head: bool = False) -> Array:
    out = np.empty_like(x)
    pointers = (None if a is None else a.ctypes.data for a in (w, b))
    args = native.NormArgs(tensor(x), tensor(out), *pointers, None, native.NORMS.index(kind), per_head, eps)
    run(isa, "norm", args, Steps([len(x)]), [out])
    return out


@pytest.mark.parametrize("kind", native.NORMS)
def test_norm(isa: str, kind: str) -> None:
    for n, size in enumerate((1, 2, 7, 8, 31, 64, 100, 1537, 5000)):
        x = rng(n).normal(1, 3, (4, size)).astype(np.float32)
        x[1] *= np.float32(1e-12)
        x[2] *= np.float32(1e12)
        x[3] = 0
        w, b = (rng(n + k).normal(size=size).astype(np.float32) for k in (50, 60))
        for weight, bias in ((None, None), (w, None), (None, b), (w, b)):
            params: dict[str, Any] = {"kind": kind, "eps": 1e-5, "add_one": False}
            expected = ref.norm(x, weight, bias, params)
            got = norm(isa, kind, x, weight, bias, 1e-5)
            # A mean that is taken away leaves the rounding of the row's size, over its deviation.
            close(got, expected, 24, 2e-6 * float(np.abs(expected).max()))
            assert np.array_equal(bits(norm(isa, kind, padded(x), weight, bias, 1e-5)), bits(got))
            for t in range(len(x)):
                assert np.array_equal(bits(norm(isa, kind, x[t : t + 1], weight, bias, 1e-5)), bits(got[t : t + 1]))


@pytest.mark.parametrize("kind", native.NORMS)
def test_norm_of_hostile_rows(isa: str, kind: str) -> None:
    edges = [np.nan, np.inf, -np.inf, 3e38, 1e-42, 1e30, 0.0]
    x = rng().normal(size=(len(edges) + 2, 40)).astype(np.float32)
    x[: len(edges), 3] = edges
    x[-1] = 0
    for eps in (1e-6, 0.0, 1e-41):
        close(norm(isa, kind, x, None, None, eps), ref.norm(x, None, None, {"kind": kind, "eps": eps}), 24, 1e-6)


def test_norm_per_head(isa: str) -> None:
    x = rng().normal(size=(6, 5, 24)).astype(np.float32)
    w, b = (rng(n).normal(size=(5, 24)).astype(np.float32) for n in (1, 2))
    params = {"kind": "rms", "eps": 1e-6, "add_one": False}
    close(norm(isa, "rms", x, w, b, 1e-6, per_head=True), ref.norm(x, w, b, params), 16, 1e-6)
    close(norm(isa, "rms", x, w[0].copy(), None, 1e-6), ref.norm(x, w[0], None, params), 16, 1e-6)


@pytest.mark.parametrize("kind", native.REDUCE)
def test_reduce(isa: str, kind: str) -> None:
    define = ref.softmax if kind == "softmax" else lambda x: getattr(np, kind)(x, axis=-1, keepdims=True)
    for n, shape in enumerate([(1, 1), (3, 7), (2, 3, 33), (1, 5000), (70, 129), (4, 8)]):
        calm = rng(n).normal(size=shape).astype(np.float32) * np.float32(5)
        edgy = hostile(rng(n), shape)
        for x in (calm, edgy, padded(calm), np.full(shape, -np.inf, np.float32)):
            expected = define(x)
            out = padded(np.empty_like(expected))
            args = native.ReduceArgs(tensor(x), tensor(out), native.REDUCE.index(kind))
            run(isa, "reduce", args, Steps([len(x)]), [out])
            size = float(np.nan_to_num(np.abs(x), nan=0, posinf=0).sum(-1).max())
            close(out, expected, 16, 0 if kind in ("max", "softmax") else 1e-7 * size)


# ------------------------------------------------------------------------------------------------ with quantised outputs


def quantiser(cols: int, group: int, rotation: int, x: Array, out: Array) -> native.QuantiseArgs:
    return native.QuantiseArgs(tensor(x), tensor(out), cols, -(-cols // group) * group, group, rotation)


def quantised_rows(tokens: int, cols: int, group: int) -> Array:
    full = -(-cols // group) * group
    words = -(-(full // 4 + 2 * (full // group)) // 16) * 16
    room = np.zeros(tokens * words + 16, np.int32)
    start = -(room.ctypes.data // 4) % 16
    return room[start : start + tokens * words].reshape(tokens, words)


@pytest.mark.parametrize(
    ("cols", "group", "rotation"), [(64, 64, 0), (100, 64, 0), (1536, 64, 64), (8960, 64, 256), (4096, 32, 0)]
)
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_fused_quantising_gives_the_bits_of_two_operations(
    isa: str, cols: int, group: int, rotation: int, tokens: int
) -> None:
    a, b = (rng(n).normal(size=(tokens, cols)).astype(np.float32) for n in (1, 2))
    a[-1, 5], b[0, cols - 1] = np.nan if tokens > 1 else 1, 1e30
    w, plain, step = b[0].copy(), np.empty_like(a), Steps([tokens])
    one, two = (quantised_rows(tokens, cols, group) for _ in range(2))
    separate, fused = (quantiser(cols, group, rotation, plain, q) for q in (one, two))
    pointer = ctypes.pointer(fused)
    run(isa, "norm", native.NormArgs(tensor(a), tensor(plain), w.ctypes.data, None, None, 0, 0, 1e-6), step, [plain])
    run(isa, "quantise", separate, step, [one])
    run(isa, "norm", native.NormArgs(tensor(a), tensor(plain), w.ctypes.data, None, pointer, 0, 0, 1e-6), step, [two])
    assert np.array_equal(one, two)
    two[:] = 0
    run(isa, "gate", native.GateArgs(tensor(a), tensor(b), tensor(plain), None, 0), step, [plain])
    close(plain, ref.ACTIVATION["silu"](a) * b, 8, 1e-37)
    run(isa, "quantise", separate, step, [one])
    run(isa, "gate", native.GateArgs(tensor(a), tensor(b), tensor(plain), pointer, 0), step, [two])
    assert np.array_equal(one, two)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu2", "sigmoid"])
def test_gate(isa: str, kind: str) -> None:
    joint = hostile(rng(), (5, 3, 2 * 700))
    a, b = joint[..., :700], joint[..., 700:]
    for x, y in ((a, b), (np.ascontiguousarray(a), padded(b))):
        out = np.empty(a.shape, np.float32)
        run(
            isa,
            "gate",
            native.GateArgs(tensor(x), tensor(y), tensor(out), None, native.UNARY.index(kind)),
            Steps([5]),
            [out],
        )
        acted = unary(isa, kind, a)
        assert np.array_equal(bits(out), bits(acted * b)) or np.array_equal(out, acted * b, equal_nan=True)


# ------------------------------------------------------------------------------------------------ rotary positions


@pytest.mark.parametrize("pairing", ["half", "inter"])
@pytest.mark.parametrize(("width", "half"), [(2, 1), (64, 32), (100, 37), (128, 64), (96, 16)])
def test_rope(isa: str, pairing: str, width: int, half: int) -> None:
    step = Steps([3, 1, 4], past=[0, 131071, 7])
    inverse = np.asarray([1e4 ** (-np.arange(half) / half), 5e5 ** (-np.arange(half) / half)], np.float32)
    factors, variant_of = np.asarray([1, 1.25], np.float32), np.asarray([0, 1, 0], np.int32)
    table = np.empty((8, 2 * half), np.float32)
    pointers = (inverse.ctypes.data, factors.ctypes.data, variant_of.ctypes.data)
    run(isa, "rope_table", native.RopeTableArgs(tensor(table), *pointers, half), step, [table])
    x = rng().normal(size=(8, 5, width)).astype(np.float32)
    variant = variant_of[step.span_of]
    rows = [
        ref.rotate(x[t : t + 1], step.positions[t : t + 1], inverse[v], float(factors[v]), pairing)
        for t, v in enumerate(variant)
    ]
    for source in (x, padded(x)):
        out = np.empty_like(x)
        args = native.RopeArgs(tensor(source), tensor(table), tensor(out), half, pairing == "inter")
        run(isa, "rope", args, step, [out])
        close(out, np.concatenate(rows), 2, 1e-6)
    own = x.copy()
    run(isa, "rope", native.RopeArgs(tensor(own), tensor(table), tensor(own), half, pairing == "inter"), step, [own])
    assert np.array_equal(bits(own), bits(out))
    cos = np.float32(1.25) * np.cos(np.float64(np.float32(131071) * inverse[1])).astype(np.float32)
    close(table[3, :half], cos, 1)
    assert math.isfinite(float(table.sum()))
