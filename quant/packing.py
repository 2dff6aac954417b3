"""Packed matrices: the bytes that the engine reads, and how codes get into them and out again.

Rows are cut into tiles of 16 and columns into groups of 64, padded with zeros. Within a group, lane l of 64 is row l//4,
column l%4 of a step of 4 columns.

Pair formats, one code for two weights: 64 codes (one a lane) cover a step of 8 columns, the weights of columns 8s + l%4 (x)
and 8s + 4 + l%4 (y) of row l//4, s = 0 … 7. A group is 256 bytes of nibbles, then bit planes of 64 bytes each:

* nibbles: the low 4 bits of step s's table index are in byte (s//2)·64 + l, in its low nibble for even s;
* plane p: bit s of byte 256 + 64p + l. p = 0: x is negative; 1: y is negative; 2, 3: bits 4 and 5 of the index.

Integer format: step c of 4 columns is the 64 bytes at 64c. weight = integer · scales[tile, group, row] · row_scales[row].

Outside of packed bytes a pair code is one uint8: the index, + 64 where x is negative, + 128 where y is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codebooks import CODEBOOKS
from .formats import GROUP, TILE, Format, find_format

__all__ = ["Bytes", "Packed", "bits_per_weight", "ceil_to", "pack_pairs", "unpack", "unpack_pairs"]

Bytes = NDArray[np.uint8]
X_NEGATIVE, Y_NEGATIVE = 64, 128
STEPS = GROUP // 8


def ceil_to(number: int, unit: int) -> int:
    """`number`, rounded up to a multiple of `unit`."""
    return -(-number // unit) * unit


@dataclass(frozen=True, eq=False)
class Packed:
    """A quantised matrix [*lead, rows, cols].

    codes uint8 [*lead, tiles, groups, bytes], scales uint8 [*lead, tiles, groups, 16], row_scales float32 [*lead, tiles·16].
    rotation: the width of the Hadamard blocks that the (padded) columns were rotated by; 0 for none.
    """

    format: str
    rows: int
    cols: int
    rotation: int
    codes: Bytes
    scales: Bytes
    row_scales: NDArray[np.float32]

    def __post_init__(self) -> None:
        form = find_format(self.format)
        tiles, groups = ceil_to(self.rows, TILE) // TILE, ceil_to(self.cols, GROUP) // GROUP
        lead = self.codes.shape[:-3]
        if form.kind == "float":
            raise ValueError(f"{form.name} is stored as it is, not packed")
        for name, shape, dtype in (
            ("codes", (*lead, tiles, groups, form.group_bytes), np.uint8),
            ("scales", (*lead, tiles, groups, TILE), np.uint8),
            ("row_scales", (*lead, tiles * TILE), np.float32),
        ):
            array: NDArray[Any] = getattr(self, name)
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"{name} of a {self.rows} × {self.cols} {form.name} matrix must be {np.dtype(dtype)} {shape}, "
                    f"not {array.dtype} {array.shape}"
                )

    @cached_property
    def padded(self) -> int:
        """Columns in whole groups."""
        return ceil_to(self.cols, GROUP)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.row_scales.nbytes


def bits_per_weight(packed: Packed) -> float:
    """All bits, scales and padding too, over the weights of the matrix."""
    return 8 * packed.nbytes / (packed.rows * packed.cols * int(np.prod(packed.codes.shape[:-3])))


def pack_pairs(codes: Bytes, form: Format) -> Bytes:
    """Pair codes [..., 32, 16] (pair 4s + j of a group: columns 8s + j and 8s + 4 + j; row of the tile) to bytes [...,
    group_bytes]."""
    lead = codes.shape[:-2]
    lanes = codes.reshape(*lead, STEPS, 4, TILE).swapaxes(-1, -2).reshape(*lead, STEPS, 64)
    low = lanes & 15
    out = np.empty((*lead, form.group_bytes), np.uint8)
    out[..., :256] = (low[..., 0::2, :] | low[..., 1::2, :] << 4).reshape(*lead, 256)
    for plane, bit in enumerate((6, 7, 4, 5)[: form.planes]):
        bits = np.packbits(lanes >> bit & 1, axis=-2, bitorder="little")
        out[..., 256 + 64 * plane : 320 + 64 * plane] = bits[..., 0, :]
    return out


def unpack_pairs(packed: Bytes, form: Format) -> Bytes:
    """The inverse of `pack_pairs`."""
    lead = packed.shape[:-1]
    nibbles = packed[..., :256].reshape(*lead, STEPS // 2, 1, 64)
    lanes = np.concatenate([nibbles & 15, nibbles >> 4], -2).reshape(*lead, STEPS, 64)
    for plane, bit in enumerate((6, 7, 4, 5)[: form.planes]):
        bits = packed[..., None, 256 + 64 * plane : 320 + 64 * plane]
        lanes |= np.unpackbits(bits, axis=-2, bitorder="little") << bit
    return lanes.reshape(*lead, STEPS, TILE, 4).swapaxes(-1, -2).reshape(*lead, STEPS * 4, TILE)


def pair_values(codes: Bytes, form: Format) -> NDArray[np.int8]:
    """The integers that pair codes [..., 32, 16] name, in the order of the columns: int8 [..., 64, 16]."""
    table = CODEBOOKS[form.name].astype(np.int8)
    index = codes & 63
    x = np.where(codes & X_NEGATIVE, -table[0][index], table[0][index])
    y = np.where(codes & Y_NEGATIVE, -table[1][index], table[1][index])
    steps = (*codes.shape[:-2], STEPS, 1, 4, TILE)
    return np.concatenate([x.reshape(steps), y.reshape(steps)], -3).reshape(*codes.shape[:-2], GROUP, TILE)


def pack_integers(values: NDArray[np.int8]) -> Bytes:
    """int8 [..., 64, 16] (column, row) to bytes [..., 1024]."""
    lead = values.shape[:-2]
    lanes = values.reshape(*lead, GROUP // 4, 4, TILE).swapaxes(-1, -2)
    return np.ascontiguousarray(lanes).reshape(*lead, GROUP * TILE).view(np.uint8)


def unpack_integers(packed: Bytes) -> NDArray[np.int8]:
    """The inverse of `pack_integers`."""
    lead = packed.shape[:-1]
    lanes = packed.view(np.int8).reshape(*lead, GROUP // 4, TILE, 4)
    return lanes.swapaxes(-1, -2).reshape(*lead, GROUP, TILE)


def unpack(packed: Packed) -> NDArray[np.int8]:
    """The integers of the matrix, int8 [*lead, rows, padded columns], in the rotated basis."""
    form = find_format(packed.format)
    if form.kind == "pair":
        values = pair_values(unpack_pairs(packed.codes, form), form)
    else:
        values = unpack_integers(packed.codes)
    *lead, tiles, groups, _, _ = values.shape
    rows = np.moveaxis(values, -1, -3).reshape(*lead, tiles * TILE, groups * GROUP)
    return rows[..., : packed.rows, :]
