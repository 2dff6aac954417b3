"""`Stored`: one weight as engines take it, in the layouts of `inferflow/kernels/cpu/abi.h`.

Float formats are the row-major array. Integer formats are tiles of 16 rows and groups of columns with scales; what they stand
for, in float32 and the original basis, is `Stored.widen`: the reference engine multiplies with that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from quant import Packed, dequantise, quantise
from quant.formats import FORMATS, GROUP

from .tiles import TILE, unpack_tiles

__all__ = [
    "FLOATS",
    "ROTATION",
    "Stored",
    "from_float",
    "from_packed",
    "joined",
    "narrowest",
    "quantised",
    "rotation_of",
]

ROTATION = 64  # wide enough to spread outliers; cheap

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

# bfloat16 has no NumPy type: its bits stand in uint16.
FLOATS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}
)


@dataclass(frozen=True, eq=False)
class Stored:
    """`format`: f32, f16, bf16; keep4, keep7, keep8; or one of `quant`'s. `shape` is the graph's: [rows, cols], or
    [experts, rows, cols], which all arrays have in front.

    Float formats: `codes` is the array itself. Else `codes` is uint8 [tiles, groups, bytes]; `scales` [tiles, groups, 16] is
    float32 for the kept formats, which may have `mins` like it, and uint8 for the others, which have `row_scales`, float32
    [16·tiles]. `rotation` is the width of the Hadamard blocks that the columns are rotated by, 0 for none.
    """

    format: str
    shape: tuple[int, ...]
    codes: Array
    group: int = 0
    rotation: int = 0
    scales: Array | None = None
    mins: Floats | None = None
    row_scales: Floats | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in (self.codes, self.scales, self.mins, self.row_scales) if a is not None)

    def finite(self) -> bool:
        """Whether no number in it is NaN or infinite: of an integer format, no scale and no minimum."""
        if self.format in ("f16", "bf16"):
            exponent = np.uint16(0x7C00 if self.format == "f16" else 0x7F80)
            return bool(((self.codes.view(np.uint16) & exponent) != exponent).all())
        floats = (self.codes, self.scales, self.mins, self.row_scales)
        return all(bool(np.isfinite(array).all()) for array in floats if array is not None and array.dtype != np.uint8)

    def widen(self) -> Floats:
        """float32 of `shape`, C-contiguous; a view where it is stored so."""
        if self.format in FLOATS:
            return to_float(self.codes, self.format)
        if self.format.startswith("keep"):
            return self._widen_kept()
        return _dequantise(self)

    def _widen_kept(self) -> Floats:
        assert self.scales is not None
        rows, cols = self.shape[-2:]
        out = np.empty((int(np.prod(self.shape[:-2], dtype=np.int64)), rows, cols), np.float32)
        lead = (len(out), *self.codes.shape[-3:-1])
        codes, scales = self.codes.reshape(*lead, -1), self.scales.reshape(*lead, TILE)
        mins = None if self.mins is None else self.mins.reshape(*lead, TILE)
        with np.errstate(all="ignore"):
            for n, matrix in enumerate(out):
                values = unpack_tiles(codes[n], rows, self.format == "keep4")
                grouped = matrix.reshape(rows, -1, self.group)
                integers = values.view(np.int8) if self.format == "keep8" else values
                np.multiply(integers.reshape(grouped.shape), _by_row(scales[n], rows), out=grouped)
                if mins is not None:
                    grouped -= _by_row(mins[n], rows)
        return out.reshape(self.shape)


def _by_row(scales: Floats, rows: int) -> Floats:
    """[tiles, groups, 16] -> [rows, groups, 1]."""
    return scales.transpose(0, 2, 1).reshape(-1, scales.shape[1])[:rows, :, None]


def to_float(array: Array, format_: str) -> Floats:
    """An array of a float format as float32."""
    if format_ == "bf16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32, copy=False)


def from_float(array: Floats, format_: str) -> Stored:
    """`array` rounded to a float format (to nearest, ties to even; NaN stays NaN)."""
    if format_ == "bf16":
        bits = array.view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
        quiet = bits >> np.uint32(16) | np.uint32(0x40)
        return Stored(format_, array.shape, np.where(np.isnan(array), quiet, rounded).astype(np.uint16))
    with np.errstate(over="ignore"):
        return Stored(format_, array.shape, np.ascontiguousarray(array.astype(FLOATS[format_], copy=False)))


def narrowest(array: Floats) -> Stored:
    """`array` in the first of bf16, f16 and f32 that holds it exactly."""
    for format_ in ("bf16", "f16"):
        stored = from_float(array, format_)
        if np.array_equal(stored.widen().view(np.uint32), array.view(np.uint32)):
            return stored
    return from_float(array, "f32")


def from_packed(packed: Packed) -> Stored:
    """What `quant` made, as a weight."""
    shape = (*packed.codes.shape[:-3], packed.rows, packed.cols)
    return Stored(
        packed.format, shape, packed.codes, GROUP, packed.rotation, packed.scales, row_scales=packed.row_scales
    )


def rotation_of(format_: str, cols: int, asked: int = ROTATION) -> int:
    """The width of the Hadamard blocks for a matrix of `cols` columns: the largest power of two up to `asked` (itself one, or
    0 for none) that divides the padded columns. Only pair codes gain by a rotation."""
    return math.gcd(asked, -(-cols // GROUP) * GROUP) if asked and FORMATS[format_].kind == "pair" else 0


def quantised(array: Floats, format_: str, rotation: int = ROTATION) -> Stored:
    """`array` in one of `quant`'s formats, uncalibrated; `rotation` is at most how wide its Hadamard blocks are.
    ValueError for numbers that are not finite."""
    return from_packed(quantise(array, format_, rotation=rotation_of(format_, array.shape[-1], rotation)))


def joined(parts: list[Stored], shape: tuple[int, ...]) -> Stored:
    """Matrices of whole tiles below one another, or experts behind one another, as one of `shape`."""
    first = parts[0]

    def together(arrays: list[Array | None]) -> Array | None:
        there = [array for array in arrays if array is not None]
        return np.concatenate(there) if len(there) > 1 else there[0] if there else None

    codes, scales, rows = (together([getattr(p, name) for p in parts]) for name in ("codes", "scales", "row_scales"))
    assert codes is not None
    return Stored(first.format, shape, codes, first.group, first.rotation, scales, row_scales=rows)


def _dequantise(stored: Stored) -> Floats:
    assert stored.scales is not None
    assert stored.row_scales is not None
    rows, cols = stored.shape[-2:]
    return dequantise(
        Packed(stored.format, rows, cols, stored.rotation, stored.codes, stored.scales, stored.row_scales)
    )
