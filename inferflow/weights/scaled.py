"""Tensors that a safetensors file keeps in two, small numbers and the scales of their blocks, seen as one.

* ``NAME_blocks``, U8 [..., n, 16]: two 4-bit floats (E2M1) a byte, the low half first; ``NAME_scales``, U8 [..., n]:
  powers of two, biased by 127. This is MXFP4, in blocks of 32, of the OCP microscaling formats 1.0. Seen as
  ``NAME_blocks`` [..., 32·n] of type ``MXFP4``.
* ``NAME``, F8_E4M3 [rows, columns]; ``NAME_scale_inv``, F32, one number for each tile of 128 × 128 (or as the config's
  ``weight_block_size`` has it), a factor in spite of its name. Seen as ``NAME``, of type ``F8_E4M3``.

Two tensors whose shapes do not go together are left as they are: the loader then says that one of them has no use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from inferflow.weights.files import Bytes, corrupt
from inferflow.weights.source import TensorInfo

__all__ = ["join", "tile_of", "unite_mxfp4", "unite_tiles"]

Array = npt.NDArray[np.float32]
_BLOCK = 32
_NAN = 255
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=-1)  # [byte, 2]
_PAIRS.flags.writeable = False


def tile_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """The tile that one scale of an 8-bit tensor is for."""
    quantised = config.get("quantization_config")
    size = quantised.get("weight_block_size") if isinstance(quantised, Mapping) else None
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in size):
        return size[0], size[1]
    return 128, 128


def join(tensors: Mapping[str, TensorInfo], tile: tuple[int, int]) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """(`tensors` with each pair as one, the name of its scales for each that is a pair)."""
    seen, scales = dict(tensors), {}
    for name, info in tensors.items():
        for whole, partner in (_mxfp4(name, info, tensors), _tiled(name, info, tensors, tile)):
            if whole is not None and partner in seen:
                seen[name], scales[name] = whole, partner
                del seen[partner]
    return seen, scales


_Pair = tuple[TensorInfo | None, str]


def _mxfp4(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> _Pair:
    partner = name.removesuffix("_blocks") + "_scales"
    scales = tensors.get(partner)
    if not name.endswith("_blocks") or scales is None or info.dtype != "U8" or scales.dtype != "U8":
        return None, partner
    if info.shape != (*scales.shape, _BLOCK // 2) or not scales.shape:
        return None, partner
    shape = (*scales.shape[:-1], scales.shape[-1] * _BLOCK)
    return TensorInfo(name, shape, "MXFP4", info.nbytes + scales.nbytes), partner


def _tiled(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], tile: tuple[int, int]) -> _Pair:
    partner = name + "_scale_inv"
    scales = tensors.get(partner)
    if scales is None or info.dtype != "F8_E4M3" or scales.dtype != "F32" or len(info.shape) != 2:
        return None, partner
    if scales.shape != tuple(-(-size // edge) for size, edge in zip(info.shape, tile, strict=True)):
        return None, partner
    return TensorInfo(name, info.shape, info.dtype, info.nbytes + scales.nbytes), partner


def unite_mxfp4(blocks: Bytes, scales: Bytes, shape: tuple[int, ...], where: str) -> Array:
    """float32 of `shape`. CheckpointError for a scale that stands for "not a number"."""
    if (scales == _NAN).any():
        raise corrupt(where, "has a scale that is not a number")
    values: Array = _PAIRS[blocks.reshape(-1, _BLOCK // 2)].reshape(-1, _BLOCK)
    with np.errstate(over="ignore"):  # 6 · 2^127 is infinite in float32
        values *= np.ldexp(np.float32(1), scales.reshape(-1, 1).astype(np.int32) - 127)
    return values.reshape(shape)


def unite_tiles(values: Array, scales: Array, tile: tuple[int, int]) -> Array:
    """`values` [rows, columns] times the scale of the tile that each is in."""
    rows, columns = values.shape
    out = np.empty_like(values)
    across = np.arange(columns) // tile[1]
    for n, line in enumerate(scales):
        part = slice(n * tile[0], min(rows, (n + 1) * tile[0]))
        out[part] = values[part] * line[across]
    return out
