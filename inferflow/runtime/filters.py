"""Truncation of a batch of distributions, and draws from them, without sorting a vocabulary.

A row is folded into `FOLD` stretches laid over each other, so that its columns' peaks and sums cost one vector pass. Few
columns reach a floor, and only what they hold is sorted. Every operation is elementwise or along one row: a row's result is
the same to the last bit whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .sampling_params import SamplingParams

__all__ = ["Head", "Weights", "choose", "draw", "largest", "tail_free", "typical", "weigh"]

Array = np.ndarray

FOLD = 16
GUESS = 2e-4  # most nuclei lie above this share: at most 5,000 candidates
TINY = float(np.finfo(np.float32).tiny)


class Weights(NamedTuple):
    """``exp((logits - max) / temperature)``: `folded` float32 [rows, FOLD, columns], where token ``f * columns + c`` is at
    ``[f, c]`` and what is beyond the vocabulary is 0; `sums` float32 [rows, columns]; `total` float64 [rows]."""

    folded: Array
    sums: Array
    total: Array

    def of(self, rows: Array) -> Weights:
        """Some of the rows."""
        return self if len(rows) == len(self.total) else Weights(self.folded[rows], self.sums[rows], self.total[rows])


class Head(NamedTuple):
    """The greatest weights of each row, in descending order (of equals, the lower id first): `ids` int64 and `weights`
    float64, both [rows, k], padded with weights of 0."""

    ids: Array
    weights: Array


def weigh(logits: Array, temperature: Array) -> Weights:
    """The weights of `logits` [rows, vocab], float32, whose greatest are finite, at temperatures [rows] above 0."""
    rows, vocab = logits.shape
    columns = -(-vocab // FOLD)
    flat = np.empty((rows, columns * FOLD), np.float32)
    flat[:, vocab:] = 0
    inner = flat[:, :vocab]
    with np.errstate(over="ignore", under="ignore"):  # to -inf, whose weight is 0
        np.subtract(logits, logits.max(axis=1, keepdims=True), out=inner)
        if (temperature != 1).any():
            inner *= (1 / temperature).astype(np.float32)[:, None]
        np.exp(inner, out=inner)
    folded = flat.reshape(rows, FOLD, columns)
    sums = folded.sum(axis=1)
    return Weights(folded, sums, sums.sum(axis=1, dtype=np.float64))


def draw(weights: Weights, uniform: Array) -> Array:
    """A token of each row [rows] by the inverse of its distribution function, at `uniform` [rows] in [0, 1)."""
    rows = np.arange(len(uniform))
    column, rest = _invert(weights.sums, uniform * weights.total)
    fold, _ = _invert(weights.folded[rows, :, column], rest)
    return fold * weights.sums.shape[1] + column


def _invert(weights: Array, target: Array) -> tuple[Array, Array]:
    """Where the running sum of `weights` [rows, n] exceeds `target` [rows], and how far the target lies beyond what came
    before. Rounding never leads to a weight of 0."""
    running = np.cumsum(weights, axis=1, dtype=np.float64)
    at = np.minimum((running <= target[:, None]).sum(axis=1), (running < running[:, -1:]).sum(axis=1))
    rows = np.arange(len(at))
    return at, target - (running[rows, at] - weights[rows, at])


def largest(weights: Weights, count: Array) -> Head:
    """At least the `count` [rows] greatest weights of each row, zeros left out."""
    peaks = weights.folded.max(axis=1)
    return head(weights, _floor(peaks, count), peaks)


def _floor(peaks: Array, count: Array) -> Array:
    """A weight that at least `count` [rows] weights of the row reach, as so many columns' `peaks` do; 0 where none is known."""
    floor = np.zeros(len(count))
    for k in np.unique(count[(count > 0) & (count <= peaks.shape[1])]):
        rows = np.flatnonzero(count == k)
        floor[rows] = np.partition(peaks[rows], -k, axis=1)[:, -k]
    return floor


def head(weights: Weights, floor: Array, peaks: Array) -> Head:
    """The weights that are at least `floor` [rows], and not 0; `peaks` [rows, columns] are the columns' greatest."""
    floor = np.clip(floor, TINY, 1).astype(np.float32)  # the greatest weight is 1
    row, column = np.nonzero(peaks >= floor[:, None])
    cells = weights.folded[row, :, column]
    which, fold = np.nonzero(cells >= floor[row, None])
    row, column, found = row[which], column[which], cells[which, fold]
    counts = np.bincount(row, minlength=len(floor))
    rank = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    # One integer orders by weight, descending, then by id: positive floats compare as their bits do.
    keys = np.full((len(floor), counts.max()), ~np.uint64(0))
    ids = (fold * peaks.shape[1] + column).astype(np.uint64)
    keys[row, rank] = (~found.view(np.uint32)).astype(np.uint64) << np.uint64(32) | ids
    keys.sort(axis=1)
    bits = ~(keys >> np.uint64(32)).astype(np.uint32)
    return Head((keys & np.uint64(0xFFFFFFFF)).astype(np.int64), bits.view(np.float32).astype(np.float64))


def choose(weights: Weights, params: Sequence[SamplingParams], mu: Array, uniform: Array) -> tuple[Array, Array]:
    """A token of each row after truncation, and its surprise in bits; both [rows]. `mu` [rows] is mirostat's, inf without it.

    The order of the filters: top-k, tail-free, typical, top-p, min-p, each on what the ones before it left. All but typical
    keep the likeliest, so what lies below any of their bounds need not be sorted.
    """
    top_p, min_p, top_k = (_values(params, name) for name in ("top_p", "min_p", "top_k"))
    peaks = weights.folded.max(axis=1)
    shaped = (_values(params, "tfs_z") < 1) | (_values(params, "typical_p") < 1)  # these look at all that top-k left
    floor = _floor(peaks, top_k)
    floor = np.where(shaped, floor, np.maximum(floor, np.maximum(min_p, weights.total * np.exp2(-mu))))
    # Tokens below (1 - p) / vocab hold less than 1 - p together, so a nucleus lies above; most lie above GUESS,
    # and the others are looked for again, deeper.
    nucleus = (top_p < 1) & (top_k <= 0) & (floor == 0) & ~shaped
    bound = np.where(nucleus, (1 - top_p) * weights.total / weights.folded[0].size, floor)
    floor = np.where(nucleus, np.maximum(bound, GUESS * weights.total), bound)
    tokens, surprise = np.empty(len(params), np.int64), np.empty(len(params))
    rows = np.arange(len(params))
    while len(rows):
        some, few = weights.of(rows), [params[row] for row in rows.tolist()]
        found = head(some, floor[rows], peaks[rows])
        tokens[rows], surprise[rows] = _pick(found, some.total, few, mu[rows], uniform[rows])
        reached = np.cumsum(found.weights, axis=1)[:, -1]
        rows = rows[(floor[rows] > bound[rows]) & (reached < top_p[rows] * some.total)]
        floor[rows] = np.maximum(bound[rows], floor[rows] / 16)
    return tokens, surprise


def _pick(
    found: Head, total: Array, params: Sequence[SamplingParams], mu: Array, uniform: Array
) -> tuple[Array, Array]:
    """`choose`, from a head that holds everything the filters may leave. Sums run in order, so padding changes none."""
    top_k, top_p, min_p = (_values(params, name)[:, None] for name in ("top_k", "top_p", "min_p"))
    ranks = np.arange(found.weights.shape[1])
    mass = np.where((top_k <= 0) | (ranks < top_k), found.weights, 0)
    whole = np.where(top_k[:, 0] > 0, np.cumsum(mass, axis=1)[:, -1], total)
    for row, p in enumerate(params):
        if p.tfs_z < 1:
            mass[row] *= tail_free(mass[row], p.tfs_z)
        if p.typical_p < 1:
            mass[row] *= typical(mass[row], p.typical_p)
        if p.tfs_z < 1 or p.typical_p < 1:
            whole[row] = np.cumsum(mass[row])[-1]
    if (top_p < 1).any():
        mass *= (np.cumsum(mass, axis=1) - mass < top_p * whole[:, None]) | (top_p == 1)
    mass *= mass >= min_p * mass.max(axis=1, keepdims=True)
    mass[:, 1:] *= mass[:, 1:] >= (total * np.exp2(-mu))[:, None]
    left = np.cumsum(mass, axis=1)[:, -1]
    rank, _ = _invert(mass, uniform * left)
    rows = np.arange(len(rank))
    return found.ids[rows, rank], np.log2(left / mass[rows, rank])


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
