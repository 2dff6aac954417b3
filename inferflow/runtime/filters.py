"""Truncation of a batch of distributions, and draws from them, without sorting a vocabulary.

A row is folded into `FOLD` stretches laid over each other, so that its columns' peaks and sums cost one vector pass. Few
columns reach a floor, and only what they hold is sorted. Exponentials of a whole row are taken where its sum is needed: not
for top-k or min-p. Every operation is elementwise or along one row: a row's result is the same to the last bit whatever rows
are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .sampling_params import SamplingParams

__all__ = ["Head", "Scores", "Weights", "choose", "draw", "fold", "head", "largest", "tail_free", "totals", "typical"]

Array = np.ndarray

FOLD = 16
BLOCK = 8  # rows weighed at a time: what is made of them stays in a core's cache
GUESS = 2e-4  # most nuclei lie above this share: at most 5,000 candidates
LOWEST = float(np.finfo(np.float32).min)


class Scores(NamedTuple):
    """Rows of logits: `folded` float32 [rows, FOLD, columns], where token ``f * columns + c`` is at ``[f, c]`` and what is
    beyond the vocabulary is -inf; `peaks` float32 [rows, columns], the columns' greatest; `best` float32 [rows], the rows'."""

    folded: Array
    peaks: Array
    best: Array

    def of(self, rows: Array | slice) -> Scores:
        """Some of the rows; all of them are not copied."""
        whole = not isinstance(rows, slice) and len(rows) == len(self.best)
        return self if whole else Scores(self.folded[rows], self.peaks[rows], self.best[rows])


class Weights(NamedTuple):
    """``exp((logits - best) / temperature)``: `folded` float32 [rows, FOLD, columns]; `sums` float32 [rows, columns]; `total`
    float64 [rows]."""

    folded: Array
    sums: Array
    total: Array


class Head(NamedTuple):
    """The greatest logits of each row, in descending order (of equals, the lower id first): `ids` int64 and `logits` float32,
    both [rows, k], padded with id 0 and -inf."""

    ids: Array
    logits: Array


def fold(logits: Array) -> Scores:
    """The rows of `logits` [rows, vocab], float32."""
    rows, vocab = logits.shape
    if vocab % FOLD:
        padded = np.full((rows, vocab + -vocab % FOLD), -np.inf, np.float32)
        padded[:, :vocab] = logits
        logits = padded
    folded = logits.reshape(rows, FOLD, -1)
    peaks = folded.max(axis=1)
    return Scores(folded, peaks, peaks.max(axis=1))


def weigh(scores: Scores, temperature: Array) -> Weights:
    """The weights of rows whose greatest logits are finite, at temperatures [rows] above 0."""
    with np.errstate(over="ignore", under="ignore"):  # to -inf, whose weight is 0
        folded = scores.folded - scores.best[:, None, None]
        if (temperature != 1).any():
            folded *= (1 / temperature).astype(np.float32)[:, None, None]
        np.exp(folded, out=folded)
    sums = folded.sum(axis=1)
    return Weights(folded, sums, sums.sum(axis=1, dtype=np.float64))


def totals(scores: Scores, temperature: Array) -> Array:
    """The sum of each row's weights, float64 [rows]."""
    return np.concatenate([weigh(scores.of(some), temperature[some]).total for some in _blocks(len(temperature))])


def draw(scores: Scores, temperature: Array, uniform: Array) -> Array:
    """A token of each row [rows] by the inverse of its distribution function, at `uniform` [rows] in [0, 1)."""
    blocks = _blocks(len(uniform))
    return np.concatenate([_draw(weigh(scores.of(some), temperature[some]), uniform[some]) for some in blocks])


def _blocks(rows: int) -> list[slice]:
    return [slice(start, start + BLOCK) for start in range(0, rows, BLOCK)]


def _draw(weights: Weights, uniform: Array) -> Array:
    rows = np.arange(len(uniform))
    column, rest = _invert(weights.sums, uniform * weights.total)
    stretch, _ = _invert(weights.folded[rows, :, column], rest)
    return stretch * weights.sums.shape[1] + column


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
    row, column = np.nonzero(scores.peaks >= floor[:, None])
    cells = scores.folded[row, :, column]
    which, stretch = np.nonzero(cells >= floor[row, None])
    row, column, found = row[which], column[which], cells[which, stretch]
    counts = np.bincount(row, minlength=len(floor))
    rank = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    # One integer orders by logit, descending, then by id: floats of one sign compare as their bits do.
    bits = found.view(np.int32)
    order = np.where(bits < 0, bits.view(np.uint32), 0x7FFFFFFF - bits).astype(np.uint64)
    keys = np.full((len(floor), counts.max()), ~np.uint64(0))
    keys[row, rank] = order << np.uint64(32) | (stretch * scores.peaks.shape[1] + column).astype(np.uint64)
    keys.sort(axis=1)
    there = np.arange(keys.shape[1]) < counts[:, None]
    ids = np.where(there, keys & np.uint64(0xFFFFFFFF), np.uint64(0)).astype(np.int64)
    flat = scores.folded.reshape(len(floor), -1)
    return Head(ids, np.where(there, np.take_along_axis(flat, ids, axis=1), np.float32(-np.inf)))


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
    bound = np.where(nucleus, (1 - top_p) * total / scores.folded[0].size, bound)
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
    """Ranks and surprises, from descending `weights` [rows, k] that hold everything the filters may leave. Sums run in order,
    so padding changes none."""
    top_k, top_p, min_p = (_values(params, name)[:, None] for name in ("top_k", "top_p", "min_p"))
    mass = np.where((top_k <= 0) | (np.arange(weights.shape[1]) < top_k), weights, 0)
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
    return rank, np.log2(left / mass[np.arange(len(rank)), rank])


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
