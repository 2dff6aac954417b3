"""What is known of a matrix's inputs, and the error feedback that makes use of it.

The error that matters is that of the products: e H eᵀ with e = w − ŵ for a row w, and H the mean of x xᵀ over inputs x. With
H = R Rᵀ, R upper triangular, it is |e R|², and column k's share of it depends on the errors of the columns up to k only. So
groups of columns are quantised one after the other, each to make up for what those before it left over: GPTQ's method
(Frantar et al. 2022), written as the LDLQ of QuIP (Chee et al. 2023), which needs one factorisation and no inverse.

Afterwards each group is quantised once more, now that the errors of all the others are known, and rows keep the better of
the two: block coordinate descent on the same error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import GROUP, Format
from .native import product
from .packing import Bytes, ceil_to
from .solve import Floats, encode, find_scales, pair_order

__all__ = ["Hessian", "Inputs", "encode_with_feedback"]

DAMPING = 0.01  # of the mean importance, added to each: calibration saw a sample only
ROUNDS = 1  # of descent


@dataclass(frozen=True)
class Hessian:
    """The damped `matrix` [padded, padded], in pair order, and its `factor` R."""

    matrix: Floats
    factor: Floats


@dataclass(frozen=True)
class Inputs:
    """Statistics of the inputs of a matrix's padded columns, in pair order. diagonal [padded]: square roots of the columns'
    importance."""

    diagonal: Floats
    hessian: Hessian | None

    @staticmethod
    def of(cols: int, rotation: int, importance: NDArray[Any] | None, hessian: NDArray[Any] | None) -> Inputs:
        """From what the caller of `quantise` gave; columns of padding are of no importance."""
        padded = ceil_to(cols, GROUP)
        used = padded if rotation and cols % rotation else cols
        order = pair_order(padded)
        found = None
        if hessian is not None:
            h = _checked("the Hessian", hessian, used, padded, 2)
            diagonal, found = h.diagonal().copy(), _factorised(h[np.ix_(order, order)])
        elif importance is not None:
            diagonal = _checked("the importance", importance, used, padded, 1)
        else:
            diagonal = np.ones(padded, np.float32)
        diagonal += DAMPING * diagonal[:used].mean()
        diagonal[used:] = 0
        return Inputs(np.sqrt(diagonal)[order], found)


def _checked(name: str, array: NDArray[Any], used: int, padded: int, ndim: int) -> Floats:
    """The statistics with zeros for padding, scaled to a mean importance of 1."""
    if array.shape not in ((used,) * ndim, (padded,) * ndim):
        raise ValueError(f"{name} of the matrix must be of shape {(used,) * ndim}, not {array.shape}")
    out = np.zeros((padded,) * ndim, np.float32)
    inner = (slice(0, used),) * ndim
    out[inner] = array[inner]
    diagonal = out if ndim == 1 else out.diagonal()
    mean = diagonal[:used].mean(dtype=np.float64)
    if not np.isfinite(out).all() or not (diagonal >= 0).all() or not 0 < mean < np.inf:
        raise ValueError(f"{name} must be finite and not negative, with a positive mean")
    out /= np.float32(mean)
    return out


def _factorised(h: Floats) -> Hessian:
    """Damped in place, and more where float32 finds it not positive."""
    damping = DAMPING
    while damping < 10:
        h[np.diag_indices_from(h)] += np.float32(damping)
        try:
            return Hessian(h, _upper(h))
        except np.linalg.LinAlgError:
            damping *= 10
    raise ValueError("the Hessian is not positive semidefinite")


def _upper(h: Floats) -> Floats:
    """R, upper triangular, with h = R Rᵀ."""
    return np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]


@dataclass
class _Rows:
    """A matrix in pair order while it is quantised: weights w and errors e = w − ŵ [rows, columns], codes uint8 [rows,
    columns / 2], scales [rows, groups] in whole steps of grid [rows]."""

    w: Floats
    error: Floats
    codes: Bytes
    scales: Floats
    grid: Floats
    form: Format

    def requantise(self, group: int, left: Floats, factor: Floats) -> None:
        """Quantises a group anew, to minimise |e R + left|² with `left` [rows, 64] what other groups' errors come to.
        Rows keep what they had where that is better (a scale of NaN: nothing)."""
        columns, pairs = _columns(group, GROUP), _columns(group, GROUP // 2)
        factor = np.ascontiguousarray(factor)
        shift = product(left, np.linalg.inv(factor))
        wanted = self.w[:, columns] + shift
        scales = find_scales(wanted, factor, self.form, self.grid)
        codes, error = encode(wanted, factor, scales, self.form)
        error -= shift
        before, after = (((product(e, factor) + left) ** 2).sum(1) for e in (self.error[:, columns], error))
        better = ~(before <= after)
        self.error[better, columns], self.codes[better, pairs] = error[better], codes[better]
        self.scales[better, group] = scales[better, 0]


def _columns(group: int, width: int) -> slice:
    return slice(group * width, (group + 1) * width)


def encode_with_feedback(w: Floats, hessian: Hessian, grid: Floats, form: Format) -> tuple[Bytes, Floats]:
    """Codes uint8 [rows, columns / 2] and scales [rows, groups], whole steps of `grid` [rows], of a matrix in pair order."""
    rows, columns = w.shape
    groups = columns // GROUP
    codes, scales = np.zeros((rows, columns // 2), np.uint8), np.zeros((rows, groups), np.float32)
    state = _Rows(w, np.full_like(w, np.nan), codes, scales, grid, form)
    for group in range(groups):
        own = _columns(group, GROUP)
        left = product(state.error, hessian.factor[: group * GROUP, own])
        state.requantise(group, left, hessian.factor[own, own])
    for group in list(range(groups)) * ROUNDS:
        own = _columns(group, GROUP)
        others = hessian.matrix[:, own].copy()
        others[own] = 0
        factor = _upper(hessian.matrix[own, own])
        left = product(product(state.error, others), np.linalg.inv(factor).T)
        state.requantise(group, left, factor)
    return state.codes, state.scales
