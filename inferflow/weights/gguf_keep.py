"""GGUF blocks taken over as integers with a scale (and a minimum) for each group, nothing lost.

Every type here is affine, or has a table of 8-bit values: ``w = q·scale − min``. The products the formats define are exact in
float32 (a scale is a half, or a half times a small integer; together with q at most 24 bits), so at most the subtraction
rounds, as it does in the format's own definition: the values equal `gguf.quants` bit for bit, but for the sign of zeros.
Block layouts: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .tiles import TILE, pack_tiles, tile_scales, tiles_of

__all__ = ["KEPT", "KeptTiles", "keep_blocks"]

Bytes = npt.NDArray[Any]  # uint8
Floats = npt.NDArray[np.float32]
_SLAB = 1 << 19  # weights taken over at a time: temporaries stay in the cache


class KeptTiles(NamedTuple):
    """`codes` uint8 [tiles, groups, bytes]; `scales`, `mins` float32 [tiles, groups, 16]."""

    codes: Bytes
    scales: Floats
    mins: Floats | None


class _Split(NamedTuple):
    """Blocks taken apart: `values` uint8 [blocks, weights] (for keep8 the bytes of int8), `scales`, `mins` [blocks, groups]."""

    values: Bytes
    scales: Floats
    mins: Floats | None = None


class _Kind(NamedTuple):
    format: str  # keep4: 0 … 15, keep8: int8
    group: int
    split: Callable[[Bytes], _Split]
    has_min: bool


# ------------------------------------------------------------------------------------------------ pieces


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _fields(packed: Bytes, run: int, bits: int, count: int) -> Bytes:
    """[blocks, n] -> [blocks, count·n]: of every `run` bytes their lowest `bits` bits, then the next ones, `count` times."""
    parts = packed.reshape(len(packed), -1, run)
    out = np.empty((len(packed), parts.shape[1], count, run), np.uint8)
    for n in range(count):
        np.right_shift(parts, n * bits, out=out[:, :, n])
        if (n + 1) * bits < 8:
            out[:, :, n] &= (1 << bits) - 1
    return out.reshape(len(packed), -1)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """[blocks, n] -> [blocks, 2n]: of every `run` bytes first the low halves, then the high ones."""
    return _fields(packed, run, 4, 2)


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 12 bytes of Q4_K and Q5_K: (scales, minima), each uint8 [blocks, 8]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    mins = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return scales, mins


def _signed(values: Bytes, middle: int) -> Bytes:
    """Values less `middle`, as int8 in bytes (arithmetic modulo 256)."""
    return values - np.uint8(middle)


# ------------------------------------------------------------------------------------------------ blocks of 32


def _q4_0(b: Bytes) -> _Split:
    d = _half(b, 0)
    return _Split(_nibbles(b[:, 2:18], 16), d, 8 * d)


def _q4_1(b: Bytes) -> _Split:
    return _Split(_nibbles(b[:, 4:20], 16), _half(b, 0), -_half(b, 2))


def _fifth(b: Bytes, at: int) -> Bytes:
    """32 bits that are the fifth of each value."""
    return np.unpackbits(b[:, at : at + 4], axis=1, bitorder="little") << 4


def _q5_0(b: Bytes) -> _Split:
    return _Split(_signed(_nibbles(b[:, 6:22], 16) | _fifth(b, 2), 16), _half(b, 0))


def _q5_1(b: Bytes) -> _Split:
    return _Split(_nibbles(b[:, 8:24], 16) | _fifth(b, 4), _half(b, 0), -_half(b, 2))


def _q8_0(b: Bytes) -> _Split:
    return _Split(b[:, 2:34], _half(b, 0))


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8).view(np.uint8)
_E2M1_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8).view(np.uint8)


def _iq4_nl(b: Bytes) -> _Split:
    return _Split(_IQ4[_nibbles(b[:, 2:18], 16)], _half(b, 0))


def _mxfp4(b: Bytes) -> _Split:
    """Half the power of two, since the table holds twice the values; the two least ones are subnormal."""
    power = b[:, :1].astype(np.uint32)
    bits = np.where(power < 2, np.uint32(0x00200000) << np.minimum(power, 1), (power - 1) << 23)
    return _Split(_E2M1_TWICE[_nibbles(b[:, 1:17], 16)], bits.astype(np.uint32).view(np.float32))


# ------------------------------------------------------------------------------------------------ blocks of 256


def _q2_k(b: Bytes) -> _Split:
    pairs = b[:, :16]
    values = _fields(b[:, 16:80], 32, 2, 4)
    return _Split(values, _half(b, 80) * (pairs & 15), _half(b, 82) * (pairs >> 4))


def _q3_k(b: Bytes) -> _Split:
    fours = _fields(b[:, :32], 32, 1, 8)  # the third bit of each value
    values = _fields(b[:, 32:96], 32, 2, 4) | fours << 2
    low, high = _nibbles(b[:, 96:104], 8), _fields(b[:, 104:108], 4, 2, 4)
    scales = _half(b, 108) * ((low | high << 4).astype(np.float32) - 32)
    return _Split(values, scales, 4 * scales)


def _q4_k(b: Bytes) -> _Split:
    scales, mins = _six_bits(b[:, 4:16])
    return _Split(_nibbles(b[:, 16:144], 32), _half(b, 0) * scales, _half(b, 2) * mins)


def _q5_k(b: Bytes) -> _Split:
    scales, mins = _six_bits(b[:, 4:16])
    values = _nibbles(b[:, 48:176], 32) | _fields(b[:, 16:48], 32, 1, 8) << 4
    return _Split(values, _half(b, 0) * scales, _half(b, 2) * mins)


def _q6_k(b: Bytes) -> _Split:
    values = _nibbles(b[:, :128], 64) | _fields(b[:, 128:192], 32, 2, 4) << 4
    return _Split(_signed(values, 32), _half(b, 208) * b[:, 192:208].view(np.int8))


def _iq4_xs(b: Bytes) -> _Split:
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> (2 * np.arange(8, dtype=np.uint16)) & 3
    low = _nibbles(b[:, 4:8], 1)
    scales = _half(b, 0) * ((low | high << 4).astype(np.float32) - 32)
    return _Split(_IQ4[_nibbles(b[:, 8:136], 16)], scales)


KEPT: Mapping[str, _Kind] = MappingProxyType(
    {
        "Q4_0": _Kind("keep4", 32, _q4_0, True),
        "Q4_1": _Kind("keep4", 32, _q4_1, True),
        "Q5_0": _Kind("keep8", 32, _q5_0, False),
        "Q5_1": _Kind("keep7", 32, _q5_1, True),
        "Q8_0": _Kind("keep8", 32, _q8_0, False),
        "Q2_K": _Kind("keep4", 16, _q2_k, True),
        "Q3_K": _Kind("keep4", 16, _q3_k, True),
        "Q4_K": _Kind("keep4", 32, _q4_k, True),
        "Q5_K": _Kind("keep7", 32, _q5_k, True),
        "Q6_K": _Kind("keep8", 16, _q6_k, False),
        "IQ4_NL": _Kind("keep8", 32, _iq4_nl, False),
        "IQ4_XS": _Kind("keep8", 32, _iq4_xs, False),
        "MXFP4": _Kind("keep8", 32, _mxfp4, False),
    }
)


def keep_blocks(rows: Bytes, kind: str, weights: int, nbytes: int) -> KeptTiles:
    """`rows`, uint8 [rows, bytes], each of whole blocks of type `kind` (`weights` values in `nbytes` bytes), in tiles."""
    format_, group, split, has_min = KEPT[kind]
    count = len(rows)
    cols = rows.shape[1] // nbytes * weights
    tiles, groups, nibbles = tiles_of(count), cols // group, format_ == "keep4"
    codes = np.empty((tiles, groups, TILE * group // (2 if nibbles else 1)), np.uint8)
    scales = np.empty((tiles, groups, TILE), np.float32)
    mins = np.empty((tiles, groups, TILE), np.float32) if has_min else None
    step = max(1, _SLAB // (TILE * max(cols, 1)))
    with np.errstate(all="ignore"):  # a scale may be infinite or NaN: that is the file's own value
        for tile in range(0, tiles, step):
            slab = np.ascontiguousarray(rows[tile * TILE : (tile + step) * TILE])
            parts = split(slab.reshape(-1, nbytes))
            here = slice(tile, tile + step)
            codes[here] = pack_tiles(parts.values.reshape(len(slab), cols), group, nibbles)
            scales[here] = tile_scales(parts.scales.reshape(len(slab), groups))
            if mins is not None and parts.mins is not None:
                mins[here] = tile_scales(parts.mins.reshape(len(slab), groups))
    return KeptTiles(codes, scales, mins)
