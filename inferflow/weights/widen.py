"""Stored bytes to arrays: floating types widen to float32, integers stay as they are.

F16, BF16 and the two 8-bit floats widen exactly. F64 is rounded to the nearest float32 (beyond its range: infinity).
F32 is returned as a read-only view of the mapped bytes when these are aligned, which is how writers lay files out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from inferflow.weights.files import Bytes

__all__ = ["ITEM_BYTES", "widen"]

# Bytes per element of every plain (not block-quantised) type, in safetensors' names.
ITEM_BYTES: dict[str, int] = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1},
}

_VIEW = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"},
    "BOOL": "u1",
}


def widen(data: Bytes, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    """`data` (uint8, exactly the tensor's bytes, little-endian) as an array of `shape`.

    float32 for the floating types; int8…int64, uint8…uint64 or bool for the others.
    """
    values = data.view(np.dtype(_VIEW[dtype])).reshape(shape)
    convert = _WIDEN.get(dtype)
    if convert is not None:
        return convert(values)
    if sys.byteorder == "big" and values.dtype.itemsize > 1:
        values = values.astype(values.dtype.newbyteorder("="))
    if not values.flags.aligned:
        values = values.copy()
    return values


def _from_double(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _from_half(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return values.astype(np.float32)


def _from_bfloat(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    wide = values.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _from_e5m2(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    half = values.astype(np.uint16) << np.uint16(8)  # E5M2 is the upper half of a float16
    return np.asarray(half.view(np.float16), np.float32)


def _e4m3_table() -> npt.NDArray[np.float32]:
    """All 256 values of E4M3 (finite only, S.1111.111 is NaN): bias 7, OCP 8-bit floating point specification 1.0."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


_E4M3 = _e4m3_table()
_E4M3.flags.writeable = False


def _from_e4m3(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return np.asarray(_E4M3[values.view(np.uint8)])


def _from_bool(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return np.asarray(values.view(np.uint8) != 0)


_WIDEN: dict[str, Callable[[npt.NDArray[np.generic]], npt.NDArray[np.generic]]] = {
    "F64": _from_double,
    "F16": _from_half,
    "BF16": _from_bfloat,
    "F8_E5M2": _from_e5m2,
    "F8_E4M3": _from_e4m3,
    "BOOL": _from_bool,
}
