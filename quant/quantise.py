"""`quantise` and `dequantise`: float matrices to `Packed` ones and back.

Pair formats get, per group of 64 columns, the scale with the smallest (weighted) error; the bytes of a row's scales count
steps of its own float scale. What is known of the matrix's inputs makes them better: an importance of each column weights
the squared error, a Hessian lets later columns make up for the errors of earlier ones (`calibrate`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibrate import Inputs, encode_with_feedback
from .formats import GROUP, TILE, Format, find_format
from .packing import Bytes, Packed, ceil_to, pack_integers, pack_pairs, unpack
from .rotation import check_rotation, hadamard
from .solve import Floats, encode, find_scales, pair_order

__all__ = ["dequantise", "quantise"]

Progress = Callable[[int, int], None]

HEADROOM = 1.1  # of the largest scale, for what feedback adds to the weights


def quantise(
    w: NDArray[Any],
    format: str,
    *,
    rotation: int = 0,
    importance: NDArray[Any] | None = None,
    hessian: NDArray[Any] | None = None,
    progress: Progress | None = None,
) -> Packed:
    """The matrix w [*lead, rows, cols], float, in a packed format (q3, q3.5, q4, q8).

    rotation: the width of the Hadamard blocks that the columns (padded to whole groups) are rotated by; 0 for none.
    importance: [cols], the mean square of each input; hessian: [cols, cols], the mean of x xᵀ over inputs x. Both are of the
    matrix's *rotated* inputs, so [padded, padded] where blocks reach into the padding; they make no difference to q8.
    progress(done, all) is called after each matrix.

    ValueError for other formats, widths that do not fit, wrong shapes, and numbers that are not finite.
    """
    form = find_format(format)
    if form.kind == "float":
        raise ValueError(f"{form.name} is no packed format: q3, q3.5, q4 and q8 are")
    if w.ndim < 2 or w.size == 0:
        raise ValueError(f"a matrix of rows and columns is wanted, not an array of shape {w.shape}")
    *lead, rows, cols = w.shape
    check_rotation(rotation, ceil_to(cols, GROUP))
    inputs = Inputs.of(cols, rotation, importance, hessian)
    matrices = w.reshape(-1, rows, cols)
    parts = []
    for done, matrix in enumerate(matrices, 1):
        parts.append(_quantise_one(matrix, form, rotation, inputs))
        if progress is not None:
            progress(done, len(matrices))
    codes, scales, row_scales = (
        np.stack(arrays).reshape(*lead, *arrays[0].shape) for arrays in zip(*parts, strict=True)
    )
    return Packed(form.name, rows, cols, rotation, codes, scales, row_scales)


def dequantise(packed: Packed) -> NDArray[np.float32]:
    """The weights float32 [*lead, rows, cols], in the basis they had before rotation."""
    *lead, tiles, groups, _ = packed.scales.shape
    scales = np.swapaxes(packed.scales, -1, -2).reshape(*lead, tiles * TILE, groups)[..., : packed.rows, :]
    steps = scales.astype(np.float32) * packed.row_scales[..., : packed.rows, None]
    values = unpack(packed).reshape(*steps.shape, GROUP) * steps[..., None]
    return hadamard(values.reshape(*lead, packed.rows, groups * GROUP), packed.rotation)[..., : packed.cols]


def _quantise_one(w: NDArray[Any], form: Format, rotation: int, inputs: Inputs) -> tuple[Bytes, Bytes, Floats]:
    """(codes, scales, row scales) of a matrix [rows, cols]. Rows are scaled by powers of two meanwhile: no square overflows."""
    rows, cols = w.shape
    padded = np.zeros((ceil_to(rows, TILE), ceil_to(cols, GROUP)), np.float32)
    padded[:rows, :cols] = w
    if not np.isfinite(padded).all():
        raise ValueError("the weights hold numbers that are not finite (or too large for float32)")
    exponents = np.frexp(np.abs(padded).max(1))[1]
    padded = hadamard(np.ldexp(padded, -exponents[:, None]), rotation)
    codes, steps, grid = _pairs(padded, form, inputs) if form.kind == "pair" else _integers(padded)
    return codes, _tiled(steps, 1)[..., 0, :], np.ldexp(grid, exponents)


def _pairs(w: Floats, form: Format, inputs: Inputs) -> tuple[Bytes, Bytes, Floats]:
    """(packed codes, scales [rows, groups], row scales) of a padded and rotated matrix."""
    w = np.ascontiguousarray(w[:, pair_order(w.shape[1])])
    scales = find_scales(w, inputs.diagonal, form)
    if inputs.factor is None:
        grid = scales.max(1) / np.float32(255)
        steps = np.rint(_ratio(scales, grid[:, None]))
        codes, _ = encode(w, inputs.diagonal, steps * grid[:, None], form)
    else:
        grid = scales.max(1) * np.float32(HEADROOM / 255)
        codes, scales = encode_with_feedback(w, inputs.factor, grid, form)
        steps = np.rint(_ratio(scales, grid[:, None]))
    return pack_pairs(_tiled(codes, GROUP // 2), form), steps.astype(np.uint8), grid


def _integers(w: Floats) -> tuple[Bytes, Bytes, Floats]:
    """The same in int8: no weight is clipped."""
    groups = w.reshape(len(w), -1, GROUP)
    needed = np.abs(groups).max(2) / np.float32(127)
    grid = needed.max(1) / np.float32(255)
    steps = np.minimum(np.ceil(_ratio(needed, grid[:, None])), np.float32(255))
    values = np.rint(_ratio(groups, (steps * grid[:, None])[..., None])).clip(-127, 127).astype(np.int8)
    return pack_integers(_tiled(values.reshape(w.shape), GROUP)), steps.astype(np.uint8), grid


def _ratio(x: Floats, y: Floats) -> Floats:
    """x / y; 0 where y is."""
    x, y = np.broadcast_arrays(x, y)
    return np.divide(x, y, out=np.zeros(x.shape, np.float32), where=y > 0)


def _tiled(values: NDArray[Any], width: int) -> NDArray[Any]:
    """[rows, groups · width] as [tiles, groups, width, 16]."""
    rows, columns = values.shape
    return np.ascontiguousarray(values.reshape(rows // TILE, TILE, columns // width, width).transpose(0, 2, 3, 1))
