"""The layout of kept integers: tiles of 16 rows, groups of columns, so that one load serves 16 outputs.

Values of a tile and group stand in steps of 4 columns; a step is 64 bytes, row after row (the formats KEPT4, KEPT7 and KEPT8
of `inferflow/kernels/cpu/abi.h`). ``keep4`` puts two steps into one, the first in the low nibbles. Rows are padded to
whole tiles with zeros; columns are whole groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["TILE", "pack_tiles", "tile_scales", "tiles_of", "unpack_tiles"]

TILE = 16
Bytes = npt.NDArray[Any]  # uint8


def tiles_of(rows: int) -> int:
    """Tiles that hold `rows` rows."""
    return -(-rows // TILE)


def pack_tiles(values: Bytes, group: int, nibbles: bool) -> Bytes:
    """uint8 [rows, cols] (values 0 … 15 with `nibbles`) -> uint8 [tiles, groups, 16·group, or half of that]."""
    rows, cols = values.shape
    tiles, groups = tiles_of(rows), cols // group
    if rows % TILE:
        values = np.concatenate([values, np.zeros((tiles * TILE - rows, cols), np.uint8)])
    steps: npt.NDArray[Any] = np.ascontiguousarray(values).view("<u4")  # one step of one row
    if nibbles:
        steps = steps[:, 0::2] | steps[:, 1::2] << np.uint32(4)
    steps = steps.reshape(tiles, TILE, groups, -1).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(steps).view(np.uint8).reshape(tiles, groups, -1)


def unpack_tiles(codes: Bytes, rows: int, nibbles: bool) -> Bytes:
    """The inverse of `pack_tiles`: uint8 [rows, cols]."""
    tiles, groups = codes.shape[:2]
    steps: npt.NDArray[Any] = np.ascontiguousarray(codes).view("<u4").reshape(tiles, groups, -1, TILE)
    steps = np.ascontiguousarray(steps.transpose(0, 3, 1, 2)).reshape(tiles * TILE, -1)
    if nibbles:
        steps = np.stack([steps & np.uint32(0x0F0F0F0F), steps >> np.uint32(4) & np.uint32(0x0F0F0F0F)], axis=-1)
        steps = steps.reshape(tiles * TILE, -1)
    return steps.view(np.uint8)[:rows]


def tile_scales(scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32 [rows, groups] -> [tiles, groups, 16], zeros for the rows that pad the last tile."""
    rows, groups = scales.shape
    tiles = tiles_of(rows)
    if rows % TILE:
        scales = np.concatenate([scales, np.zeros((tiles * TILE - rows, groups), np.float32)])
    return np.ascontiguousarray(scales.reshape(tiles, TILE, groups).transpose(0, 2, 1))
