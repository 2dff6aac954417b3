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
    # -15.165 dB, as integers -15.162 dB
    "q3": (
        (5, 5, 5, 9, 10, 15, 15, 17, 27, 27, 27, 30, 40, 40, 50, 58),
        (5, 15, 27, 40, 58, 5, 15, 27, 6, 19, 35, 52, 7, 23, 38, 12),
    ),
    # -18.055 dB, as integers -18.067 dB
    "q3.5": (
        (
            3, 3, 4, 4, 4, 5, 6, 8, 9, 10, 11, 11, 14, 15, 16, 18, 18, 19, 22, 24, 25, 27, 27, 30, 31, 32,
            36, 40, 41, 45, 53, 54,
        ),
        (
            3, 9, 15, 21, 28, 36, 45, 3, 58, 9, 16, 24, 32, 3, 10, 17, 41, 24, 4, 11, 30, 20, 53, 4, 38, 13,
            26, 5, 16, 39, 23, 7,
        ),
    ),
    # -20.938 dB, as integers -20.956 dB
    "q4": (
        (
            2, 2, 2, 2, 2, 3, 3, 3, 5, 5, 6, 6, 7, 7, 7, 7, 8, 8, 9, 10, 10, 11, 11, 11, 13, 13, 14, 14, 14,
            15, 16, 16, 17, 17, 19, 19, 19, 20, 21, 21, 23, 23, 23, 25, 25, 26, 26, 26, 27, 28, 29, 31, 32,
            33, 33, 37, 37, 38, 39, 43, 44, 45, 54, 55,
        ),
        (
            2, 7, 11, 16, 20, 25, 30, 36, 5, 43, 9, 13, 2, 17, 21, 54, 25, 30, 10, 6, 14, 2, 19, 36, 10, 24,
            6, 16, 30, 43, 2, 13, 9, 20, 6, 26, 34, 16, 2, 11, 6, 20, 53, 26, 41, 2, 10, 15, 33, 6, 21, 2,
            14, 8, 28, 3, 20, 40, 11, 28, 4, 16, 7, 23,
        ),
    ),
}
# fmt: on

# uint8 [2, points], at most 63.
CODEBOOKS: Mapping[str, NDArray[np.uint8]] = {name: np.array(points, np.uint8) for name, points in POINTS.items()}

DEVIATIONS: Mapping[str, float] = {"q3": 22.95, "q3.5": 19.54, "q4": 16.82}
