"""The compiled helper, `_search*.so` beside this file (built from `search.cpp`): the hot loops of `solve` and `rotation`.

Every function here returns nothing (None or False) where there is no library; the NumPy definitions then do the work, with
the same results, some hundred times slower. `available()` says which it is.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .formats import GROUP

__all__ = ["available", "encode", "find_scales", "hadamard"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@cache
def _library() -> ctypes.CDLL | None:
    found = sorted(Path(__file__).parent.glob("_search*.so")) + sorted(Path(__file__).parent.glob("_search*.pyd"))
    return ctypes.CDLL(str(found[0])) if found else None


def available() -> bool:
    """Whether the compiled helper is there."""
    return _library() is not None


def _threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pointer(array: NDArray[np.generic] | None) -> int | None:
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError("the compiled helper wants contiguous arrays")
    return array.ctypes.data


def find_scales(
    w: Floats,
    factor: Floats,
    table: Bytes,
    deviation: float,
    grid: Floats | None,
    tries: tuple[float, float, int, int],
) -> Floats | None:
    """`solve.find_scales`; tries: its NARROW, WIDE, CANDIDATES, REFITS."""
    if (library := _library()) is None:
        return None
    scales = np.empty((w.shape[0], w.shape[1] // GROUP), np.float32)
    narrow, wide, candidates, refits = tries
    parts = np.array([step / (candidates - 1) for step in range(candidates)], np.float32)
    library.find_scales(
        *(POINTER(_pointer(array)) for array in (w, factor, table, grid, parts, scales)),
        *(LONG(n) for n in (*w.shape, factor.ndim == 2, table.shape[1], candidates, refits, _threads())),
        *(FLOAT(x) for x in (deviation, narrow, wide)),
    )
    return scales


def encode(w: Floats, factor: Floats, scales: Floats, table: Bytes) -> tuple[Bytes, Floats] | None:
    """`solve.encode`."""
    if (library := _library()) is None:
        return None
    codes, error = np.empty((w.shape[0], w.shape[1] // 2), np.uint8), np.empty_like(w)
    library.encode(
        *(POINTER(_pointer(array)) for array in (w, factor, table, np.ascontiguousarray(scales), codes, error)),
        *(LONG(n) for n in (*w.shape, factor.ndim == 2, table.shape[1], _threads())),
    )
    return codes, error


def hadamard(x: Floats, width: int) -> bool:
    """`rotation.hadamard` in place."""
    if (library := _library()) is None:
        return False
    library.hadamard(POINTER(_pointer(x)), LONG(x.size // width), LONG(width), LONG(_threads()))
    return True
