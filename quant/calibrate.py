"""What is known of a matrix's inputs, and the error feedback that makes use of it.

The error that matters is that of the products: (w − ŵ) H (w − ŵ)ᵀ for a row w, with H the mean of x xᵀ over inputs x. With
H = R Rᵀ, R upper triangular, it is |(w − ŵ) R|², and column k's share of it depends on the errors of the columns up to k
only. So groups of columns are quantised one after the other, each to make up for what those before it left over: GPTQ's
method (Frantar et al. 2022), written as the LDLQ of QuIP (Chee et al. 2023), which needs one factorisation and no inverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import GROUP, Format
from .packing import Bytes, ceil_to
from .solve import Floats, encode, find_scales, pair_order

__all__ = ["Inputs", "encode_with_feedback"]

DAMPING = 0.01  # of the mean importance, added to each: calibration saw a sample only


@dataclass(frozen=True)
class Inputs:
    """Statistics of the inputs of a matrix's padded columns, in pair order.

    diagonal [padded]: square roots of the columns' importance. factor [padded, padded] or None: the Cholesky factor R.
    """

    diagonal: Floats
    factor: Floats | None

    @staticmethod
    def of(cols: int, rotation: int, importance: NDArray[Any] | None, hessian: NDArray[Any] | None) -> Inputs:
        """From what the caller of `quantise` gave; columns of padding are of no importance."""
        padded = ceil_to(cols, GROUP)
        used = padded if rotation and cols % rotation else cols
        order = pair_order(padded)
        if hessian is not None:
            h = _checked("the Hessian", hessian, used, padded, 2)
            diagonal, factor = h.diagonal(), _factor(h[np.ix_(order, order)])
        elif importance is not None:
            diagonal, factor = _checked("the importance", importance, used, padded, 1), None
        else:
            diagonal, factor = np.ones(padded, np.float32), None
        damped = diagonal + DAMPING * diagonal[:used].mean()
        damped[used:] = 0
        return Inputs(np.sqrt(damped).astype(np.float32)[order], factor)


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


def _factor(h: Floats) -> Floats:
    """R, upper triangular with h + damping = R Rᵀ. Damped more where float32 finds it not positive."""
    damping = DAMPING
    while True:
        damped = h[::-1, ::-1].copy()
        damped[np.diag_indices_from(damped)] += np.float32(damping)
        try:
            return np.ascontiguousarray(np.linalg.cholesky(damped)[::-1, ::-1])
        except np.linalg.LinAlgError:
            damping *= 10
            if damping > 10:
                raise ValueError("the Hessian is not positive semidefinite") from None


def encode_with_feedback(w: Floats, factor: Floats, grid: Floats, form: Format) -> tuple[Bytes, Floats]:
    """Codes uint8 [rows, columns / 2] and scales [rows, groups], whole steps of `grid` [rows], of a matrix in pair order."""
    rows, columns = w.shape
    error = np.zeros_like(w)
    codes = np.empty((rows, columns // 2), np.uint8)
    scales = np.empty((rows, columns // GROUP), np.float32)
    for group in range(columns // GROUP):
        start, stop = group * GROUP, (group + 1) * GROUP
        own = np.ascontiguousarray(factor[start:stop, start:stop])
        shift = (error[:, :start] @ factor[:start, start:stop]) @ np.linalg.inv(own)
        target = w[:, start:stop] + shift
        scale = find_scales(target, own, form, grid)
        codes[:, start // 2 : stop // 2], rest = encode(target, own, scale, form)
        error[:, start:stop] = rest - shift
        scales[:, group] = scale[:, 0]
    return codes, scales
