"""Truncation of a batch of distributions, and draws from them, without sorting a vocabulary.

Few columns of the folded rows (`kernels.logits`) reach a floor, and only what they hold is sorted. Exponentials of a whole row
are taken where its sum is needed: not for top-k or min-p. Every operation is elementwise or along one row: a row's result is
the same to the last bit whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..kernels.logits import FOLD, Rows, logits_of, rows_of, weight
from ..kernels.native import Pool
from .sampling_params import SamplingParams

__all__ = ["Head", "Scores", "choose", "draw", "fold", "head", "largest", "tail_free", "totals", "typical"]

Array = np.ndarray

GUESS = 2e-4  # most nuclei lie above this share: at most 5,000 candidates
LOWEST = float(np.finfo(np.float32).min)


class Scores(NamedTuple):
    """Rows of logits: `peaks` float32 [rows, columns], the greatest of each column; `best` float32 [rows], of each row, NaN
    where it holds one; `tokens` int64 [rows], the first that has it."""

    rows: Rows
    peaks: Array
    best: Array
    tokens: Array

    def of(self, some: Array) -> Scores:
        """Some of the rows; all of them are not copied."""
        if len(some) == len(self.best):
            return self
        return Scores(self.rows.of(some), self.peaks[some], self.best[some], self.tokens[some])


class Head(NamedTuple):
    """The greatest logits of each row, in descending order (of equals, the lower id first): `ids` int64 and `logits` float32,
    both [rows, k], padded with id 0 and -inf."""

    ids: Array
    logits: Array


def fold(logits: Array | Rows, pool: Pool | None = None) -> Scores:
    """The rows of `logits` [rows, vocab], float32; work on them is done on the threads of `pool` (None: the caller's)."""
    rows = logits if isinstance(logits, Rows) else rows_of(logits, pool)
    return Scores(rows, *rows.peaks())


def totals(scores: Scores, temperature: Array) -> Array:
    """The sum of each row's weights, ``exp((logits - best) / temperature)``: float64 [rows]. The greatest logits are finite,
    the temperatures [rows] above 0."""
    return np.cumsum(_folded(scores.rows.sums(scores.best, temperature)), axis=1, dtype=np.float64)[:, -1]


def draw(scores: Scores, temperature: Array, uniform: Array) -> Array:
    """A token of each row [rows] by the inverse of its distribution function, at `uniform` [rows] in [0, 1)."""
    sums, rows = scores.rows.sums(scores.best, temperature), np.arange(len(uniform))
    coarse, finer = _folded(sums), sums.reshape(len(rows), FOLD, -1)
    outer, rest = _invert(coarse, uniform * np.cumsum(coarse, axis=1, dtype=np.float64)[:, -1])
    inner, rest = _invert(finer[rows, :, outer], rest)
    column = inner * coarse.shape[1] + outer
    cells = scores.rows.cells(rows, column)
    stretch, _ = _invert(weight(cells, scores.best[:, None], temperature[:, None]), rest)
    return stretch * sums.shape[1] + column


def _folded(sums: Array) -> Array:
    """Columns' sums [rows, columns], folded once more: [rows, columns / FOLD]."""
    return sums.reshape(len(sums), FOLD, -1).sum(axis=1)


def _invert(weights: Array, target: Array) -> tuple[Array, Array]:
    """Where the running sum of `weights` [rows, n] exceeds `target` [rows], and how far the target lies beyond what came
    before. Rounding never leads to a weight of 0."""
    running = np.cumsum(weights, axis=1, dtype=np.float64)
    at = np.minimum((running <= target[:, None]).sum(axis=1), (running < running[:, -1:]).sum(axis=1))
    rows = np.arange(len(at))
    return at, target - (running[rows, at] - weights[rows, at])


def largest(scores: Scores, count: Array) -> Head:
    """At least the `count` [rows] greatest logits of each row; -inf is left out."""
    return head(scores, _reached_by(scores.peaks, count))


def _reached_by(peaks: Array, count: Array) -> Array:
    """What at least `count` [rows] logits of the row reach, as so many columns' `peaks` do; -inf where none is known."""
    floor = np.full(len(count), -np.inf)
    for k in np.unique(count[(count > 0) & (count <= peaks.shape[1])]):
        rows = np.flatnonzero(count == k)
        some = peaks[rows]
        while some.shape[1] % FOLD == 0 and 4 * k <= some.shape[1] // FOLD:  # fewer columns do as well
            some = some.reshape(len(rows), FOLD, -1).max(axis=1)
        floor[rows] = np.partition(some, -k, axis=1)[:, -k]
    return floor


def head(scores: Scores, floor: Array) -> Head:
    """The logits that are at least `floor` [rows], and not -inf; one that rounds to it may be among them."""
    floor = np.nextafter(np.clip(floor, LOWEST, scores.best).astype(np.float32), np.float32(LOWEST))
    keys, counts = scores.rows.reaching(scores.peaks, floor)
    there = np.arange(keys.shape[1]) < counts[:, None]
    keys = np.where(there, keys, ~np.uint64(0))
    keys.sort(axis=1)
    ids = np.where(there, keys & np.uint64(0xFFFFFFFF), np.uint64(0)).astype(np.int64)
    return Head(ids, np.where(there, logits_of(keys), np.float32(-np.inf)))


def choose(scores: Scores, params: Sequence[SamplingParams], mu: Array, uniform: Array) -> tuple[Array, Array]:
    """A token of each row after truncation, and its surprise in bits; both [rows]. `mu` [rows] is mirostat's, inf without it.

    The order of the filters: top-k, tail-free, typical, top-p, min-p, each on what the ones before it left. All but typical
    keep the likeliest, so what lies below any of their bounds need not be sorted.
    """
    temperature, top_p, min_p, top_k = (_values(params, name) for name in ("temperature", "top_p", "min_p", "top_k"))
    shaped = (_values(params, "tfs_z") < 1) | (_values(params, "typical_p") < 1)  # these look at all that top-k left
    summed = np.flatnonzero((top_p < 1) & (top_k <= 0) & ~shaped | (mu < np.inf))
    total = np.zeros(len(params))
    if len(summed):
        total[summed] = totals(scores.of(summed), temperature[summed])
    bound = np.where(shaped, 0, np.maximum(min_p, total * np.exp2(-mu)))
    # Tokens below (1 - p) / vocab hold less than 1 - p together, so a nucleus lies above; most lie above GUESS,
    # and the others are looked for again, deeper.
    nucleus = (total > 0) & (bound == 0)
    bound = np.where(nucleus, (1 - top_p) * total / scores.rows.vocab, bound)
    share = np.where(nucleus, np.maximum(bound, GUESS * total), bound)
    highest = _reached_by(scores.peaks, top_k)
    tokens, surprise = np.empty(len(params), np.int64), np.empty(len(params))
    rows = np.arange(len(params))
    while len(rows):
        some, few, heat = scores.of(rows), [params[row] for row in rows.tolist()], temperature[rows]
        with np.errstate(divide="ignore"):
            found = head(some, np.maximum(highest[rows], some.best + heat * np.log(np.minimum(share[rows], 1))))
        weights = np.exp((found.logits - some.best[:, None].astype(np.float64)) / heat[:, None])
        rank, surprise[rows] = _pick(weights, total[rows], few, mu[rows], uniform[rows])
        tokens[rows] = found.ids[np.arange(len(rows)), rank]
        reached = np.cumsum(weights, axis=1)[:, -1]
        rows = rows[(share[rows] > bound[rows]) & (reached < top_p[rows] * total[rows])]
        share[rows] = np.maximum(bound[rows], share[rows] / 16)
    return tokens, surprise


def _pick(
    weights: Array, total: Array, params: Sequence[SamplingParams], mu: Array, uniform: Array
) -> tuple[Array, Array]:
    """Ranks and surprises, from descending `weights` [rows, k] that hold everything the filters may leave. What top-k, top-p,
    min-p and mirostat leave is a beginning of them. Sums run in order, so padding changes none."""
    top_k, top_p, min_p = (_values(params, name) for name in ("top_k", "top_p", "min_p"))
    rows, ranks = np.arange(len(params)), np.arange(weights.shape[1])
    limited = top_k > 0
    shaped = [row for row, p in enumerate(params) if p.tfs_z < 1 or p.typical_p < 1]
    if shaped or limited.any():
        weights = np.where(~limited[:, None] | (ranks < top_k[:, None]), weights, 0)
    for row in shaped:
        if params[row].tfs_z < 1:
            weights[row] *= tail_free(weights[row], params[row].tfs_z)
        if params[row].typical_p < 1:
            weights[row] *= typical(weights[row], params[row].typical_p)
    running = np.cumsum(weights, axis=1)
    left = np.full(len(params), weights.shape[1])
    if (top_p < 1).any():
        limited[shaped] = True
        whole = np.where(limited, running[:, -1], total)
        left = np.where(top_p < 1, (running - weights < (top_p * whole)[:, None]).sum(axis=1), left)
    least = np.maximum(min_p * weights.max(axis=1), total * np.exp2(-mu))
    if least.any():
        left = np.minimum(left, 1 + (ranks * (weights >= least[:, None])).max(axis=1))
    most = running[rows, left - 1]
    rank = np.minimum((running <= (uniform * most)[:, None]).sum(axis=1), (running < most[:, None]).sum(axis=1))
    return rank, np.log2(most / weights[rows, rank])


def tail_free(mass: Array, z: float) -> Array:
    """Which of the descending `mass` [k] to keep: those before the curvature of the sorted distribution has summed to more than
    `z` of its whole; the first always. Bricken, Tail Free Sampling (2019), counted as its later implementations do."""
    p = mass[mass > 0] / mass.sum()
    keep = mass > 0
    if len(p) > 2:
        curvature = np.abs(np.diff(p, 2))
        whole = curvature.sum()
        share = curvature / whole if whole > 1e-6 else np.full(len(p) - 2, 1 / (len(p) - 2))
        beyond = np.flatnonzero(np.cumsum(share) > z)
        if len(beyond):
            keep[np.flatnonzero(keep)[max(1, beyond[0]) :]] = False
    return keep


def typical(mass: Array, p: float) -> Array:
    """Which of `mass` [k] to keep: the smallest set of tokens that holds `p` of it, those first whose surprise is nearest to
    the entropy. Meister et al., Locally Typical Sampling (2022), arXiv:2202.00666."""
    there = np.flatnonzero(mass > 0)
    share = mass[there] / mass[there].sum()
    surprise = -np.log(share)
    order = np.argsort(np.abs(surprise - (share * surprise).sum()), kind="stable")
    before = np.cumsum(share[order]) - share[order]
    keep = np.zeros(len(mass), bool)
    keep[there[order[before < p]]] = True
    return keep


def _values(params: Sequence[SamplingParams], name: str) -> Array:
    return np.asarray([getattr(p, name) for p in params])
