"""Running one operation of the native engine on NumPy arrays, under every instruction set, and comparing what it gives."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from inferflow.kernels import native

Array = np.ndarray
ISAS = tuple(native.isas())  # of this build and processor; test_isa names those that are not here
NOTHING = native.Tensor(None, -1, native.NONE, 0)


def tensor(a: Array, leading: int = native.TOKENS) -> native.Tensor:
    """A view of `a` (4-byte elements; any strides), its first axis the leading one unless that is NONE."""
    assert a.itemsize == 4
    strides = [s // 4 for s in a.strides]
    lead = 0 if leading == native.NONE else 1
    sizes, inner = a.shape[lead:], strides[lead:]
    made = native.Tensor(a.ctypes.data, 0, leading, len(sizes), 0, 0, strides[0] if lead else 0)
    made.sizes[: len(sizes)] = sizes
    made.strides[: len(inner)] = inner
    return made


class Steps:
    """A step of `counts[n]` tokens at positions `past[n]`, … for each sequence n; keeps what the structs point at."""

    def __init__(self, counts: Sequence[int], past: Sequence[int] | None = None, slots: Sequence[int] | None = None,
                 rows: Sequence[int] = ()) -> None:  # fmt: skip
        past, slots = past or [0] * len(counts), slots or list(range(len(counts)))
        starts = np.cumsum([0, *counts])
        self.positions = np.concatenate([p + np.arange(c) for p, c in zip(past, counts, strict=True)]).astype(np.int64)
        self.span_of = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
        self.row_index = np.asarray(rows, np.int64)
        spans = [native.Span(starts[n], counts[n], past[n], 0, slots[n]) for n in range(len(counts))]
        self.spans = native.array(native.Span, spans)
        self.struct = native.Step(
            sum(counts), len(rows), None, self.positions.ctypes.data, self.row_index.ctypes.data,
            self.span_of.ctypes.data, ctypes.addressof(self.spans), len(counts), None, None,
        )  # fmt: skip


def run(isa: str, name: str, args: Any, step: Steps, outputs: Sequence[Array]) -> None:
    """The operation in one call for all its units, then again unit by unit on three threads: `outputs` hold the same bits."""
    op = native.array(native.Op, [native.Op(native.OPCODES.index(name), 0, ctypes.addressof(args))])
    before = [out.copy() for out in outputs]
    native.run(native.Pool(1), native.isas()[isa], op, 1, step.struct)
    once = [out.copy() for out in outputs]
    for out, old in zip(outputs, before, strict=True):
        out[...] = old
    native.run(native.Pool(3), native.isas()[isa], op, 1, step.struct)
    for out, old in zip(outputs, once, strict=True):
        assert np.array_equal(out.view(np.int32), old.view(np.int32))


def close(got: Array, expected: Array, ulps: float = 16, absolute: float = 0.0) -> None:
    """Within `ulps` units in the last place, or `absolute`; NaN and infinities in the same places."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    error = np.abs(got[finite].astype(np.float64) - expected[finite])
    allowed = np.maximum(ulps * np.spacing(np.abs(expected[finite])), absolute)
    worst = np.argmax(error - allowed) if error.size else 0
    assert (error <= allowed).all(), f"{got[finite][worst]!r} for {expected[finite][worst]!r}"


def hostile(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 3.0) -> Array:
    """Random numbers, every eighth of them one of float32's edges."""
    edges = np.asarray(
        [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-42, 1e30, -1e30, 3e38, 1e-30, 0.5, 88.0, -104.0], np.float32
    )
    x = rng.normal(size=shape).astype(np.float32) * np.float32(scale)
    return np.where(rng.random(shape) < 0.125, rng.choice(edges, shape), x)


def padded(a: Array) -> Array:
    """The same numbers with gaps between them: a view with strides of its own on every axis."""
    room = np.full(tuple(2 * n + 1 for n in a.shape), 7, np.float32)
    view = room[tuple(slice(1, None, 2) for _ in a.shape)]
    view[...] = a
    return view
