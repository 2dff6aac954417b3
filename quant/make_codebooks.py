"""Makes the tables of `quant.codebooks`: ``python quant/make_codebooks.py`` prints them, after some minutes.

A pair code is two sign bits and the index of a point of one quadrant, so a codebook is a quantiser of (|x|, |y|), x and y
Gaussian. Lloyd's iteration runs from many random starts on a fine grid that carries the density; the best quadrants are
then scaled to integers of at most `LIMIT`, at many scales, and each integer point is moved by one while that helps.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LIMIT = 63  # largest coordinate: two products of a weight and an int8 activation then fit 16 bits
REACH = 5.2  # where the density is cut off, in standard deviations
STEPS = [(dx, dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1) if (dx, dy) != (0, 0)]


def density(cells: int) -> tuple[Array, Array]:
    """Points [cells², 2] of the quadrant and their probabilities [cells²]."""
    axis = (np.arange(cells) + 0.5) * (REACH / cells)
    line = np.exp(-0.5 * axis**2)
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    mass = np.outer(line, line).reshape(-1)
    return points, mass / mass.sum()


def scores(points: Array, codebook: Array) -> Array:
    """[points, entries]: half the squared length of the point minus half its squared distance to the entry."""
    return points @ codebook.T - 0.5 * (codebook**2).sum(1)


def error(points: Array, mass: Array, codebook: Array) -> float:
    """Mean squared error per coordinate."""
    return float(mass @ (0.5 * (points**2).sum(1) - scores(points, codebook).max(1)))


def lloyd(points: Array, mass: Array, size: int, iterations: int, rng: np.random.Generator) -> Array:
    """A locally optimal quadrant [size, 2], from a random start."""
    codebook = np.abs(rng.standard_normal((size, 2))) * rng.uniform(1.0, 1.5)
    for _ in range(iterations):
        index = scores(points, codebook).argmax(1)
        weight = np.bincount(index, mass, size)
        means = np.stack([np.bincount(index, mass * points[:, axis], size) for axis in (0, 1)], 1)
        empty = weight == 0
        codebook = np.where(empty[:, None], codebook * 0.7, means / np.where(empty, 1, weight)[:, None])
    return codebook


def improve(points: Array, mass: Array, codebook: Array) -> Array:
    """One round over the integer points, each moved to the best of its neighbours."""
    codebook, all_scores = codebook.copy(), scores(points, codebook)
    for entry in range(len(codebook)):
        all_scores[:, entry] = -np.inf
        others = all_scores.max(1)
        tried = np.clip(codebook[entry] + np.array([(0, 0), *STEPS]), 0, LIMIT)
        found = scores(points, tried)
        best = (mass @ np.maximum(found, others[:, None])).argmax()
        codebook[entry], all_scores[:, entry] = tried[best], found[:, best]
    return codebook


def integers(points: Array, mass: Array, codebook: Array, scale: float) -> tuple[float, float, Array]:
    """Moves the integers of `codebook` (`scale` of them are a standard deviation) while that helps: its error, the scale
    that suits it, and the codebook."""
    best = np.inf
    while True:
        codebook = improve(points * scale, mass, codebook)
        value = error(points * scale, mass, codebook) / scale**2
        if value > best * (1 - 1e-6):
            return best, scale, codebook
        best = value
        chosen = codebook[scores(points * scale, codebook).argmax(1)]
        scale *= float(mass @ (chosen**2).sum(1)) / float(mass @ (points * scale * chosen).sum(1))


def make(size: int, starts: int = 40, kept: int = 4, seed: int = 0) -> tuple[float, float, float, Array]:
    """The best of `starts` quadrants of `size` points: its error in dB, that of its best integers, their standard
    deviation, and the integers, sorted."""
    rng = np.random.default_rng(seed)
    coarse, fine = density(96), density(400)
    found = [lloyd(*coarse, size, 200, rng) for _ in range(starts)]
    found = sorted(found, key=lambda quadrant: error(*coarse, quadrant))[:kept]
    scales = [(quadrant, largest / quadrant.max()) for quadrant in found for largest in range(LIMIT - 8, LIMIT + 1)]
    rounded = [integers(*coarse, np.rint(quadrant * scale), scale) for quadrant, scale in scales]
    _, scale, codebook = min(rounded, key=lambda result: result[0])
    value = error(fine[0] * scale, fine[1], codebook) / scale**2
    exact = min(error(*fine, quadrant) for quadrant in found)
    return 10 * np.log10(exact), 10 * np.log10(value), scale, codebook[np.lexsort(codebook.T[::-1])]


def main() -> None:
    for size in [int(word) for word in sys.argv[1:]] or [16, 32, 64]:
        exact, rounded, scale, codebook = make(size)
        print(f"# {size} points a quadrant: {exact:.3f} dB, as integers {rounded:.3f} dB")
        print(f"deviation {scale:.3f}")
        for axis in codebook.T.astype(int):
            print("(" + ", ".join(map(str, axis)) + "),", flush=True)


if __name__ == "__main__":
    main()
