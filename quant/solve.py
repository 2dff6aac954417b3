"""Finds the codes and scales of groups: the NumPy definition, which `search.cpp` repeats bit for bit, faster.

Matrices come in *pair order*: the columns 0 4 1 5 2 6 3 7 of each step of eight, so that columns 2p and 2p + 1 are the two
weights of pair code p. A group is 64 of them. The error of a choice, e = z − scale · q, is measured by an upper triangular
factor R [64, 64] as |e R|². With R = diag(√importance) that is a weighted squared error, and every pair is on its own. With
a Cholesky factor of a Hessian (H = R Rᵀ) column k counts e_k R_kk + Σ_{j<k} e_j R_jk: what earlier columns left over is
known when pair p is chosen, and the best point of the codebook makes up for it. That is successive rounding with error
feedback, as in GPTQ and LDLQ, two columns at a time.

A factor is given as [64, 64] for a matrix of one group, or by its diagonals, [columns], for any number of groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import native
from .codebooks import CODEBOOKS, DEVIATIONS
from .formats import GROUP, Format
from .packing import X_NEGATIVE, Y_NEGATIVE, Bytes

__all__ = ["Floats", "encode", "find_scales", "pair_order"]

Floats = NDArray[np.float32]

PAIRS = GROUP // 2
CANDIDATES = 12  # scales that are tried
NARROW, WIDE = 0.8, 1.25  # the first and last of them, of the scale that suits a Gaussian of the group's power
REFITS = 2  # times that least squares mends the scale, and the codes follow


def pair_order(columns: int) -> NDArray[np.intp]:
    """The columns in pair order."""
    return np.arange(columns).reshape(-1, 2, 4).swapaxes(1, 2).reshape(-1)


def find_scales(w: Floats, factor: Floats, form: Format, grid: Floats | None = None) -> Floats:
    """The scales [rows, groups] with the smallest loss: candidates from the group's power to its largest weight, then least
    squares. With `grid` [rows], each is a whole number (0 … 255) of grid steps."""
    table, deviation = CODEBOOKS[form.name], DEVIATIONS[form.name]
    scales = native.find_scales(w, factor, table, deviation, grid, (NARROW, WIDE, CANDIDATES, REFITS))
    if scales is None:
        groups = zip(_groups(w), _factors(factor), strict=True)
        scales = np.stack([_find_scale(z, r, table, np.float32(deviation), grid) for z, r in groups], 1)
    return scales


def encode(w: Floats, factor: Floats, scales: Floats, form: Format) -> tuple[Bytes, Floats]:
    """The codes uint8 [rows, columns / 2] for given scales [rows, groups], and the errors e [rows, columns]. A scale of 0
    stands for zeros."""
    table = CODEBOOKS[form.name]
    if (done := native.encode(w, factor, scales, table)) is not None:
        return done
    groups = zip(_groups(w), _factors(factor), scales.T, strict=True)
    results = [_encode(z, r, scale, table.astype(np.float32)) for z, r, scale in groups]
    return np.concatenate([r.codes for r in results]).T, np.concatenate([r.error for r in results]).T


def _groups(w: Floats) -> list[Floats]:
    return [np.ascontiguousarray(w[:, start : start + GROUP].T) for start in range(0, w.shape[1], GROUP)]


def _factors(factor: Floats) -> list[Floats]:
    return [factor] if factor.ndim == 2 else [np.diag(part) for part in factor.reshape(-1, GROUP)]


@dataclass(frozen=True)
class _Encoded:
    """codes [32, rows], error e [64, rows], loss |e R|² [rows]; fitted [rows]: the scale that suits the codes best."""

    codes: Bytes
    error: Floats
    loss: Floats
    fitted: Floats


def _encode(z: Floats, factor: Floats, scale: Floats, table: Floats) -> _Encoded:
    """The codes of one group, z [64, rows], pair after pair."""
    rows = z.shape[1]
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    left, whole = np.zeros_like(z), np.zeros_like(z)  # of the pairs so far: Σ e_j R_jk, Σ z_j R_jk
    codes, error = np.empty((PAIRS, rows), np.uint8), np.empty_like(z)
    loss, cross, power = (np.zeros(rows, np.float32) for _ in range(3))
    for i in range(0, GROUP, 2):
        a, b, c = factor[i, i], factor[i, i + 1], factor[i + 1, i + 1]
        zx, zy = z[i], z[i + 1]
        own_x, own_y = zx * a, zx * b + zy * c
        x, y = (own_x + left[i]) * inverse, (own_y + left[i + 1]) * inverse
        codes[i // 2], qx, qy = _nearest(x, y, (a * table[0], b * table[0], c * table[1]), table)
        ex, ey = zx - scale * qx, zy - scale * qy
        rest_x, rest_y = ex * a + left[i], (ex * b + ey * c) + left[i + 1]
        all_x, all_y = whole[i] + own_x, whole[i + 1] + own_y
        made_x, made_y = all_x - rest_x, all_y - rest_y
        loss += rest_x * rest_x + rest_y * rest_y
        cross += all_x * made_x + all_y * made_y
        power += made_x * made_x + made_y * made_y
        error[i], error[i + 1] = ex, ey
        for row, wrong, value in ((factor[i], ex, zx), (factor[i + 1], ey, zy)):
            left[i + 2 :] += np.outer(row[i + 2 :], wrong)
            whole[i + 2 :] += np.outer(row[i + 2 :], value)
    ratio = np.divide(cross, power, out=np.ones_like(cross), where=power > 0)
    return _Encoded(codes, error, loss, scale * np.maximum(ratio, np.float32(0)))


def _nearest(x: Floats, y: Floats, made: tuple[Floats, Floats, Floats], table: Floats) -> tuple[Bytes, Floats, Floats]:
    """The signed point q with the smallest (x − a qx)² + (y − b qx − c qy)²: its code and coordinates. `made`: a |qx|, b |qx|
    and c |qy| of all points."""

    def distances(k: int | NDArray[np.intp]) -> tuple[Floats, Floats]:
        """With the better sign of qy: for positive and for negative qx."""
        u, v, w = (part[k] for part in made)
        up_x, up_y, down_x, down_y = x - u, np.abs(y - v) - w, x + u, np.abs(y + v) - w
        return up_x * up_x + up_y * up_y, down_x * down_x + down_y * down_y

    best, index = np.full(x.shape, np.inf, np.float32), np.zeros(x.shape, np.intp)
    for k in range(table.shape[1]):
        value = np.minimum(*distances(k))
        index, best = np.where(value < best, k, index), np.minimum(value, best)
    up, down = distances(index)
    x_negative = down < up
    y_negative = np.where(x_negative, y + made[1][index], y - made[1][index]) < 0
    codes = index + np.where(x_negative, X_NEGATIVE, 0) + np.where(y_negative, Y_NEGATIVE, 0)
    qx, qy = table[0][index], table[1][index]
    return codes.astype(np.uint8), np.where(x_negative, -qx, qx), np.where(y_negative, -qy, qy)


def _find_scale(z: Floats, factor: Floats, table: Bytes, deviation: np.float32, grid: Floats | None) -> Floats:
    """The scales [rows] of one group, z [64, rows]."""
    low, high = _range(z, np.diag(factor), np.float32(table.max()), deviation)
    best, chosen, fitted = np.full(z.shape[1], np.inf, np.float32), np.zeros_like(low), low
    for attempt in range(CANDIDATES + REFITS):
        part = np.float32(attempt / (CANDIDATES - 1))
        scale = _snap(low + (high - low) * (part * part) if attempt < CANDIDATES else fitted, grid)
        tried = _encode(z, factor, scale, table.astype(np.float32))
        better = tried.loss < best
        best = np.where(better, tried.loss, best)
        chosen, fitted = np.where(better, scale, chosen), np.where(better, tried.fitted, fitted)
    return chosen


def _range(z: Floats, diagonal: Floats, most: np.float32, deviation: np.float32) -> tuple[Floats, Floats]:
    """The smallest and the largest scale to try. Columns of no importance do not count."""
    total, power, largest = np.float32(0), np.zeros_like(z[0]), np.zeros_like(z[0])
    for weight, value in zip(diagonal, z, strict=True):
        if weight > 0:
            total += weight * weight
            power += (weight * value) * (weight * value)
            largest = np.maximum(largest, np.abs(value))
    usual = np.sqrt(power / total) / deviation if total > 0 else power
    return usual * np.float32(NARROW), np.maximum(usual * np.float32(WIDE), largest / most)


def _snap(scale: Floats, grid: Floats | None) -> Floats:
    """The nearest number of grid steps that a byte holds, times the step."""
    if grid is None:
        return scale
    steps = np.divide(scale, grid, out=np.zeros_like(scale), where=grid > 0)
    return np.minimum(np.rint(steps), np.float32(255)) * grid
