"""The codebooks of the pair formats, made by `make_codebooks.py`; fixed for good, since packed files name their points.

Of each: |x|, then |y| of the points of a quadrant, and how many units are a standard deviation of the Gaussian it suits.
Beside each: its mean squared error on Gaussians, before and after rounding to integers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["CODEBOOKS", "DEVIATIONS"]

# fmt: off
POINTS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    # -15.161 dB, as integers -15.162 dB
    "q3": (
        (5, 5, 5, 9, 10, 15, 15, 17, 27, 27, 27, 30, 40, 40, 50, 58),
        (5, 15, 27, 40, 58, 5, 15, 27, 6, 19, 35, 52, 7, 23, 38, 12),
    ),
    # -18.012 dB, as integers -18.037 dB
    "q3.5": (
        (
            3, 3, 3, 4, 5, 9, 9, 9, 10, 10, 13, 15, 16, 16, 17, 18, 22, 23, 23, 24, 27, 30, 30, 30, 35, 37,
            38, 38, 48, 48, 51, 62,
        ),
        (
            4, 12, 21, 31, 42, 9, 16, 57, 3, 25, 34, 19, 4, 11, 44, 27, 18, 3, 10, 35, 25, 5, 15, 52, 36,
            24, 4, 13, 6, 20, 37, 11,
        ),
    ),
    # -20.907 dB, as integers -20.929 dB
    "q4": (
        (
            2, 2, 2, 2, 2, 3, 3, 4, 5, 5, 5, 6, 6, 7, 8, 8, 9, 9, 10, 11, 11, 12, 12, 12, 12, 14, 14, 14,
            14, 15, 16, 18, 18, 18, 19, 20, 20, 21, 22, 22, 24, 24, 25, 25, 26, 27, 27, 29, 30, 31, 32, 32,
            33, 35, 37, 37, 40, 42, 42, 45, 46, 47, 56, 58,
        ),
        (
            2, 6, 10, 14, 18, 24, 30, 36, 3, 43, 52, 10, 20, 15, 2, 6, 24, 30, 10, 14, 18, 2, 6, 37, 62, 10,
            22, 28, 46, 16, 6, 2, 10, 33, 24, 14, 19, 6, 28, 40, 2, 10, 16, 52, 22, 6, 31, 11, 2, 16, 23,
            40, 8, 30, 3, 16, 9, 23, 49, 34, 4, 14, 24, 7,
        ),
    ),
}
# fmt: on

# uint8 [2, points], at most 63.
CODEBOOKS: Mapping[str, NDArray[np.uint8]] = {name: np.array(points, np.uint8) for name, points in POINTS.items()}

DEVIATIONS: Mapping[str, float] = {"q3": 22.95, "q3.5": 20.16, "q4": 18.51}
