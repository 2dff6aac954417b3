"""The compiled helper, `_search*.so` beside this file (built from `search.cpp`): the hot loops of `solve` and `rotation`.

Where there is no library, functions return nothing (None or False), and the NumPy definitions do the work with the same
results, some hundred times slower; `product` then is NumPy's. `available()` says which it is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import GROUP, TILE

__all__ = ["available", "encode", "find_scales", "hadamard", "product"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


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


def _call(
    name: str, arrays: Sequence[NDArray[Any] | None], numbers: Sequence[int], reals: Sequence[float] = ()
) -> None:
    """Calls a function of the library. It takes pointers (null for None), 64-bit integers, floats, in that order."""
    for array in arrays:
        if array is not None and not array.flags.c_contiguous:
            raise ValueError("the compiled helper wants contiguous arrays")
    library = _library()
    assert library is not None
    getattr(library, name)(
        *(ctypes.c_void_p(None if array is None else array.ctypes.data) for array in arrays),
        *map(ctypes.c_int64, numbers),
        *map(ctypes.c_float, reals),
    )


def _stored(factor: Floats) -> Floats:
    """A factor as the library reads it: transposed, so that the columns of R are contiguous."""
    return np.ascontiguousarray(factor.T)


def find_scales(
    w: Floats,
    factor: Floats,
    table: Bytes,
    deviation: float,
    grid: Floats | None,
    tries: tuple[float, float, int, int],
) -> Floats | None:
    """`solve.find_scales`; tries: its NARROW, WIDE, CANDIDATES, REFITS."""
    if not available():
        return None
    scales = np.empty((w.shape[0], w.shape[1] // GROUP), np.float32)
    narrow, wide, candidates, refits = tries
    parts = np.array([step / (candidates - 1) for step in range(candidates)], np.float32)
    sizes = (*w.shape, factor.ndim == 2, table.shape[1], candidates, refits, _threads())
    _call("find_scales", (w, _stored(factor), table, grid, parts, scales), sizes, (deviation, narrow, wide))
    return scales


def encode(w: Floats, factor: Floats, scales: Floats, table: Bytes) -> tuple[Bytes, Floats] | None:
    """`solve.encode`."""
    if not available():
        return None
    codes, error = np.empty((w.shape[0], w.shape[1] // 2), np.uint8), np.empty_like(w)
    sizes = (*w.shape, factor.ndim == 2, table.shape[1], _threads())
    _call("encode", (w, _stored(factor), table, np.ascontiguousarray(scales), codes, error), sizes)
    return codes, error


def product(a: Floats, b: Floats) -> Floats:
    """The first columns of a [rows, at least depth] times b [depth, 64]. For products so short that the threads of a BLAS
    would, on a busy machine, wait for one another longer than they compute."""
    rows, depth = len(a), len(b)
    if not available() or rows % TILE:
        return a[:, :depth] @ b
    out = np.empty((rows, GROUP), np.float32)
    sizes = (rows, depth, a.shape[1], _threads())
    _call("product", (np.ascontiguousarray(a), np.ascontiguousarray(b), out), sizes)
    return out


def hadamard(x: Floats, width: int) -> bool:
    """`rotation.hadamard` in place."""
    if available():
        _call("hadamard", (x,), (x.size // width, width, _threads()))
    return available()
