"""Matrices of every weight format, under every instruction set, against NumPy that reads the layouts as abi.h states them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import pytest

from inferflow.kernels import native

from .native_ops import ISAS, NOTHING, Array, Steps, run, tensor

PAIRS = {"q3": 2, "q3.5": 3, "q4": 4}  # format -> bit planes
KEPT = ("keep4", "keep7", "keep8")
FLOATS = ("f32", "f16", "bf16")
FORMATS = native.FORMATS
CASES = [(f, 64) for f in FORMATS] + [(f, group) for f in KEPT for group in (16, 32)]


@pytest.fixture(params=ISAS)
def isa(request):
    return str(request.param)


@dataclass
class Weights:
    """A stack of random matrices: the struct, what it points at, and `values`, float64 [stack, rows, padded] integers (or the
    floats), with their scales and mins, [stack, rows, groups]."""

    struct: native.Matrix
    values: Array
    scales: Array
    mins: Array
    keep: list[Array] = field(default_factory=list)

    def dense(self) -> Array:
        """Float64 [stack, rows, padded]: the weights, rotated as they are stored."""
        group = self.struct.group or self.values.shape[-1]
        return self.values * np.repeat(self.scales, group, -1) - np.repeat(self.mins, group, -1)


def unpack(codes: Array, form: str, group: int, codebook: Array) -> Array:
    """Integers [tiles, groups, steps of 4 columns, 16 rows, 4 columns] of code bytes [tiles, groups, bytes]."""
    head = codes.shape[:2]
    if form in PAIRS:
        nibbles = codes[..., :256].reshape(*head, 4, 1, 64) >> np.array([0, 4]).reshape(2, 1) & 15
        index = nibbles.reshape(*head, 8, 64).astype(int)
        bits = codes[..., 256:].reshape(*head, PAIRS[form], 1, 64) >> np.arange(8).reshape(8, 1) & 1
        for plane in range(2, PAIRS[form]):
            index += bits[:, :, plane].astype(int) << (plane + 2)
        signed = [codebook[n].astype(int)[index] * (1 - 2 * bits[:, :, n].astype(int)) for n in (0, 1)]
        steps = np.stack(signed, 3).reshape(*head, 16, 64)
    elif form == "keep4":
        steps = codes.reshape(*head, group // 8, 1, 64) >> np.array([0, 4]).reshape(2, 1) & 15
        steps = steps.reshape(*head, group // 4, 64)
    else:
        steps = codes.view(np.int8).reshape(*head, group // 4, 64)
    return steps.reshape(*head, group // 4, 16, 4)


def rows_of(tiled: Array, rows: int) -> Array:
    """[tiles, groups, 16, …] -> [rows, groups, …], flat from the third axis on."""
    moved = np.moveaxis(tiled, 2, 1)
    return moved.reshape(moved.shape[0] * 16, -1)[:rows]


def integers(form: str, group: int, shape: tuple[int, int, int], rng: np.random.Generator, extreme: bool) -> Weights:
    stack, rows, cols = shape
    tiles, groups = -(-rows // 16), -(-cols // group)
    size = 256 + 64 * PAIRS[form] if form in PAIRS else group * (8 if form == "keep4" else 16)
    codes = rng.integers(0, 256, (stack, tiles, groups, size)).astype(np.uint8)
    if form == "keep7":
        codes &= 127
    if extreme:
        codes[...] = {"keep7": 127, "q8": 128, "keep8": 128}.get(form, 255)
    entries = 16 << (PAIRS.get(form, 2) - 2)
    codebook = np.full((2, entries), 63, np.uint8) if extreme else rng.integers(0, 64, (2, entries)).astype(np.uint8)
    kept = form in KEPT
    scales = rng.random((stack, tiles, groups, 16)).astype(np.float32) if kept else rng.integers(
        0, 256, (stack, tiles, groups, 16)
    ).astype(np.uint8)  # fmt: skip
    mins = rng.normal(size=scales.shape).astype(np.float32) if form in ("keep4", "keep7") else None
    row_scales = rng.normal(size=(stack, rows)).astype(np.float32) * np.float32(1e-3)
    if extreme:
        scales[...], row_scales[...], mins = 1, 1, None
    bias = np.zeros((stack, rows), np.float32) if extreme else rng.normal(size=(stack, rows)).astype(np.float32)
    tables = [unpack(codes[s], form, group, codebook).transpose(0, 1, 3, 2, 4) for s in range(stack)]
    struct = native.Matrix(
        FORMATS.index(form), group, rows, cols, groups * group, stack, 0, codes.ctypes.data, scales.ctypes.data,
        None if mins is None else mins.ctypes.data, None if kept else row_scales.ctypes.data, bias.ctypes.data,
        codebook.ctypes.data, codes[0].size, scales[0].size, rows,
    )  # fmt: skip
    scale = np.stack([rows_of(scales[s].astype(np.float64)[..., None], rows) for s in range(stack)])
    return Weights(
        struct,
        np.stack([rows_of(t, rows) for t in tables]).astype(np.float64),
        scale if kept else scale * row_scales[..., None],
        np.zeros_like(scale) if mins is None else np.stack([rows_of(mins[s][..., None], rows) for s in range(stack)]),
        [codes, scales, row_scales, bias, codebook, *([] if mins is None else [mins])],
    )


def floats(form: str, shape: tuple[int, int, int], rng: np.random.Generator) -> Weights:
    w = rng.normal(size=shape).astype(np.float32)
    if form == "bf16":
        stored = (w.view(np.uint32) >> 16).astype(np.uint16)
        w = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = w.astype(np.float16) if form == "f16" else w
        w = stored.astype(np.float32)
    bias = rng.normal(size=shape[:2]).astype(np.float32)
    struct = native.Matrix(
        FORMATS.index(form), 0, shape[1], shape[2], shape[2], shape[0], 0, stored.ctypes.data, None, None, None,
        bias.ctypes.data, None, stored[0].nbytes, 0, 0,
    )  # fmt: skip
    ones = np.ones((*shape[:2], 1))
    return Weights(struct, w.astype(np.float64), ones, 0 * ones, [stored, bias])


def make(
    form: str, group: int, shape: tuple[int, int, int], rng: np.random.Generator, extreme: bool = False
) -> Weights:
    return floats(form, shape, rng) if form in FLOATS else integers(form, group, shape, rng, extreme)


def aligned(rows: int, words: int) -> Array:
    """Float32 [rows, words] of zeros; every row begins on 64 bytes."""
    stride = -(-words // 16) * 16
    room = np.zeros(rows * stride + 16, np.float32)
    start = -room.ctypes.data % 64 // 4
    return room[start : start + rows * stride].reshape(rows, stride)


def hadamard(x: Array, width: int) -> Array:
    """Float32 [t, n·width]: the orthonormal Hadamard transform of each block, in the native engine's order."""
    y = x.reshape(len(x), -1, width)
    h = 1
    while h < width:
        pair = y.reshape(*y.shape[:2], width // (2 * h), 2, h)
        y = np.stack([pair[..., 0, :] + pair[..., 1, :], pair[..., 0, :] - pair[..., 1, :]], -2).reshape(y.shape)
        h *= 2
    return (y * np.float32(1 / np.sqrt(width))).reshape(x.shape)


def quantised(x: Array, group: int, rotation: int) -> tuple[Array, Array]:
    """Int values [t, padded] and float32 scales [t, groups] of float32 x [t, cols]."""
    padded = -(-x.shape[1] // max(group, rotation)) * max(group, rotation)
    x = np.pad(x, ((0, 0), (0, padded - x.shape[1])))
    x = (hadamard(x, rotation) if rotation else x)[:, :padded]
    blocks = x.reshape(len(x), -1, group)
    most = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(most > 0, np.float32(127) / most, 0).astype(np.float32)
    values = np.rint(blocks * inverse[..., None]).astype(int)
    return values.reshape(len(x), -1), (most / np.float32(127)).astype(np.float32)


def quantise(isa: str, x: Array, w: native.Matrix, rotation: int = 0) -> Array:
    """The native engine's quantised rows of x [t, cols] for that matrix."""
    out = aligned(len(x), w.padded // 4 + 2 * w.padded // w.group)
    args = native.QuantiseArgs(tensor(x), tensor(out), x.shape[1], w.padded, w.group, rotation)
    run(isa, "quantise", args, Steps([len(x)]), [out])
    return out


def parts(rows: Array, padded: int, group: int) -> tuple[Array, Array, Array]:
    """Values, scales and sums of quantised rows."""
    groups = padded // group
    values = np.ascontiguousarray(rows[:, : padded // 4]).view(np.int8)
    scales = rows[:, padded // 4 : padded // 4 + groups]
    return values, scales, np.ascontiguousarray(rows[:, padded // 4 + groups : padded // 4 + 2 * groups]).view(np.int32)


def linear(isa: str, rows: Array, weights: list[Weights], residual: Array | None = None) -> list[Array]:
    outs = [np.zeros((len(rows), w.struct.rows), np.float32) for w in weights]
    args = native.LinearArgs(
        tensor(rows), len(weights), native.array(native.Matrix, [w.struct for w in weights]),
        native.array(native.Tensor, [tensor(out) for out in outs]),
        native.array(native.Tensor, [NOTHING if residual is None else tensor(residual) for _ in outs]),
    )  # fmt: skip
    run(isa, "linear", args, Steps([len(rows)]), outs)
    return outs


def inputs(isa: str, x: Array, w: Weights) -> tuple[Array, Array]:
    """What an operation reads for x, and the same as float64 [t, padded]."""
    if not w.struct.group:
        return x, x.astype(np.float64)
    rows = quantise(isa, x, w.struct)
    values, scales, _ = parts(rows, w.struct.padded, w.struct.group)
    return rows, values * np.repeat(scales.astype(np.float64), w.struct.group, -1)


def near(got: Array, a: Array, b: Array, more: Array | float = 0.0) -> None:
    """got is a · bᵀ + more, to float32's precision of the sum of magnitudes."""
    error = np.abs(got - (a @ b.T + more))
    assert (error <= 3e-6 * (np.abs(a) @ np.abs(b).T + np.abs(more))).all(), error.max()


@pytest.mark.parametrize(
    ("group", "rotation", "cols"), [(64, 0, 130), (64, 64, 1000), (32, 0, 96), (16, 0, 48), (64, 1024, 3072)]
)
def test_quantise_has_numpys_bits(isa, group, rotation, cols):
    x = np.random.default_rng(1).normal(size=(5, cols)).astype(np.float32)
    x[2] = 0
    x[3, : group // 2] *= 1e30
    padded = -(-cols // group) * group
    rows = quantise(isa, x, native.Matrix(group=group, padded=padded), rotation)
    values, scales, sums = parts(rows, padded, group)
    expected, expected_scales = quantised(x, group, rotation)
    np.testing.assert_array_equal(values, expected[:, :padded])
    np.testing.assert_array_equal(scales, expected_scales[:, : padded // group])
    np.testing.assert_array_equal(sums, values.reshape(5, -1, group).sum(-1, dtype=np.int64))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_group(isa, bad):
    x = np.ones((3, 128), np.float32)
    x[1, 70] = bad
    w = integers("q3.5", 64, (1, 20, 128), np.random.default_rng(2), False)
    rows = quantise(isa, x, w.struct)
    _, scales, _ = parts(rows, 128, 64)
    assert np.isnan(scales[1, 1])
    assert np.isfinite(np.delete(scales.ravel(), 3)).all()
    (out,) = linear(isa, rows, [w])
    assert np.isnan(out[1]).all()
    assert np.array_equal(out[0], out[2])
    assert np.isfinite(out[0]).all()


@pytest.mark.parametrize(("form", "group"), CASES)
def test_linear(isa, form, group):
    rng = np.random.default_rng(3)
    weights = [make(form, group, (1, rows, 200), rng) for rows in (37, 5, 64)]
    x = rng.normal(size=(90, 200)).astype(np.float32)
    rows, a = inputs(isa, x, weights[0])
    outs = linear(isa, rows, weights)
    for w, out in zip(weights, outs, strict=True):
        near(out, a, w.dense()[0], w.keep[1 if form in FLOATS else 3][0].astype(np.float64))
    for tokens in (1, 2, 3, 5, 6, 7, 8, 13, 30, 49):  # the same bits, whatever else is in the batch
        for out, alone in zip(outs, linear(isa, rows[20 : 20 + tokens], weights), strict=True):
            assert np.array_equal(out[20 : 20 + tokens].view(np.int32), alone.view(np.int32))
    residual = rng.normal(size=(90, 37)).astype(np.float32)
    (added,) = linear(isa, rows, weights[:1], residual)
    assert np.array_equal(added, outs[0] + residual)


@pytest.mark.parametrize(("form", "group"), [("q3", 64), ("q3.5", 64), ("q8", 64), ("keep4", 32), ("f32", 0)])
@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_glu_has_the_bits_of_its_parts(isa, form, group, tokens):
    rng = np.random.default_rng(12)
    a, b = (make(form, group, (1, 150, 200), rng) for _ in range(2))
    x = rng.normal(size=(tokens, 200)).astype(np.float32)
    rows, _ = inputs(isa, x, a)
    step, padded, (left, right) = Steps([tokens]), 192, linear(isa, rows, [a, b])
    for rotation in (0, 64):
        one, two = (aligned(tokens, padded // 4 + 6) for _ in range(2))
        separate, fused = (native.QuantiseArgs(tensor(left), tensor(q), 150, padded, 64, rotation) for q in (one, two))
        kind = native.UNARY.index("silu")
        gate = native.GateArgs(tensor(left), tensor(right), tensor(left), ctypes.pointer(separate), kind)
        run(isa, "gate", gate, step, [one])
        matrices = native.array(native.Matrix, [a.struct, b.struct])
        run(isa, "glu", native.GluArgs(tensor(rows), matrices, ctypes.pointer(fused), kind), step, [two])
        assert np.array_equal(one.view(np.int32), two.view(np.int32))


@pytest.mark.parametrize("form", [*PAIRS, "q8", *KEPT])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_largest_integers_are_summed_exactly(isa, form, tokens):
    rng = np.random.default_rng(4)
    w = integers(form, 64, (1, 18, 128), rng, True)
    rows = aligned(tokens, 32 + 4)
    values = np.where(rng.random((tokens, 128)) < 0.5, -127, 127) if tokens > 1 else np.full((1, 128), 127)
    rows[:, :32] = values.astype(np.int8).view(np.float32)
    rows[:, 32:34] = 1
    rows[:, 34:36] = values.reshape(tokens, 2, 64).sum(-1, dtype=np.int32).view(np.float32)
    (out,) = linear(isa, rows, [w])
    np.testing.assert_array_equal(out, values @ w.values[0].T)


@pytest.mark.parametrize(("form", "group"), [("f32", 64), ("bf16", 64), ("q3.5", 64), ("q8", 64), ("keep4", 32)])
@pytest.mark.parametrize("per_choice", [0, 1])
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_experts(isa, form, group, per_choice, tokens):
    rng, stack, topk, rows = np.random.default_rng(5), 6, 3, 21
    w = make(form, group, (stack, rows, 96), rng)
    x = rng.normal(size=(tokens * (topk if per_choice else 1), 96)).astype(np.float32)
    ids = rng.integers(0, stack, (tokens, topk)).astype(np.int32)
    ids[0, 0] = stack  # no such expert
    given, a = inputs(isa, x, w)
    view = given.reshape(tokens, topk, -1) if per_choice else given
    out = np.zeros((tokens, topk, rows), np.float32)
    args = native.ExpertsArgs(tensor(view), tensor(ids), tensor(out), ctypes.pointer(w.struct), topk, per_choice)
    run(isa, "experts", args, Steps([tokens]), [out])
    bias = w.keep[1 if form in FLOATS else 3].astype(np.float64)
    for t, k in np.ndindex(tokens, topk):
        if (t, k) == (0, 0):
            assert np.isnan(out[t, k]).all()
        else:
            row = a[t * topk + k if per_choice else t]
            near(out[t, k][None], row[None], w.dense()[ids[t, k]], bias[ids[t, k]])


@pytest.mark.parametrize(("form", "group"), CASES)
@pytest.mark.parametrize("rotation", [0, 64])
def test_embed(isa, form, group, rotation):
    if form in FLOATS and rotation:
        return
    w = make(form, group, (1, 50, 192), np.random.default_rng(6))
    w.struct.rotation = rotation
    ids = np.array([49, 0, 17, 50, -1], np.int64)
    out = np.zeros((5, 192), np.float32)
    step = Steps([5])
    step.struct.ids = ids.ctypes.data
    run(isa, "embed", native.EmbedArgs(NOTHING, tensor(out), ctypes.pointer(w.struct), 0, 0), step, [out])
    rows = w.dense()[0][ids[:3]]
    if rotation:
        signs = np.array([[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)]) / 8
        rows = (rows.reshape(3, -1, 64) @ signs).reshape(3, -1)
    np.testing.assert_allclose(out[:3], rows[:, :192], rtol=1e-5, atol=1e-5 * np.abs(rows).max())
    assert np.isnan(out[3:]).all()
