"""Blocked Walsh–Hadamard rotations: they spread outliers over a block, so that its weights look Gaussian.

The rotation is its own inverse and orthonormal; rotating a matrix's columns and its inputs leaves the products as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import native

__all__ = ["check_rotation", "hadamard", "widest_rotation"]


def widest_rotation(cols: int, most: int = 4096) -> int:
    """The largest power of two, at most `most`, that divides `cols`; 0 for one below 2."""
    width = min(cols & -cols, most)
    return width if width > 1 else 0


def check_rotation(width: int, cols: int) -> None:
    """Refuses what is no power of two from 2 that divides `cols`, and no 0."""
    if width and (width < 2 or width & (width - 1) or cols % width):
        raise ValueError(
            f"a rotation of {width} columns is impossible: a power of two that divides {cols} is wanted, or 0"
        )


def hadamard(x: NDArray[Any], width: int) -> NDArray[np.float32]:
    """Each block of `width` columns of x [..., cols] times the orthonormal Hadamard matrix in natural order; float32.

    Stages of width 1, 2, 4, …: (a, b) becomes (a + b, a − b); then one multiplication by float32(1/√width). All in
    float32, so every implementation gives the same bits. ValueError for a width that is no power of two or does not divide
    the columns; 0 is no rotation.
    """
    check_rotation(width, x.shape[-1])
    out = np.array(x, np.float32, order="C")
    if width == 0 or out.size == 0 or native.hadamard(out, width):
        return out
    half = 1
    while half < width:
        pairs = out.reshape(-1, 2, half)
        first, second = pairs[:, 0].copy(), pairs[:, 1]
        pairs[:, 0] += second
        np.subtract(first, second, out=second)
        half *= 2
    out *= np.float32(1 / np.sqrt(width))
    return out
