"""Beam search over any source of logits: what to keep, of which parent, and when to stop.

It knows no engine. The caller runs the beams as sequences of one batch, gives `BeamSearch.step` their logits, and makes the
next beams as it says: beam i goes on from old beam ``parents[i]`` (a copy-on-write fork of its blocks) with ``tokens[i]``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError, InferflowError
from ..spec.expression import show
from .filters import fold, largest, totals
from .sampling_params import whole

__all__ = ["Beam", "BeamSearch"]


class Beam(NamedTuple):
    """An answer: its tokens, the end token included, and its log-probability over its length to the power of the penalty."""

    tokens: tuple[int, ...]
    score: float


class BeamSearch:
    """The `width` likeliest answers. Of each step's 2·width best continuations, those that end are answers if they are among
    the best `width`; the others go on. An answer's score is its log-probability / length^`length_penalty`.

    It is `done` when no beam can do better than the worst of `width` answers, or after `max_tokens`.
    """

    def __init__(self, width: int, ends: Collection[int], max_tokens: int, length_penalty: float = 1.0) -> None:
        if not whole(width, 1, 128):
            raise ArgumentError(
                f"it is {show(width)}", where="beam width", fix="it must be a whole number from 1 to 128"
            )
        self.width = width
        self.ends = frozenset(ends)
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.live: list[tuple[int, ...]] = [()]
        self.scores = np.zeros(1)  # log-probabilities of the live beams
        self.answers: list[Beam] = []  # the best first
        self.done = False

    def step(self, logits: np.ndarray) -> tuple[list[int], list[int]]:
        """Parents and tokens of the next beams, the best first, from `logits` [beams, vocab] of the live ones; both empty when
        the search is done. Raises InferflowError for logits that are not finite."""
        if not np.isfinite(logits.max(axis=1)).all():
            fix = "the weights are corrupt, or the spec is wrong"
            raise InferflowError("the model gives no finite logits", where="step", fix=fix)
        parents, tokens, scores = self._continuations(logits)
        going: list[int] = []
        for rank, (parent, token, score) in enumerate(zip(parents, tokens, scores, strict=True)):
            if token in self.ends:
                if rank < self.width:
                    self._answer((*self.live[parent], token), score)
            elif len(going) < self.width:
                going.append(rank)
        self.live = [(*self.live[parents[rank]], tokens[rank]) for rank in going]
        self.scores = np.asarray([scores[rank] for rank in going])
        self.done = not going or self._settled()
        if not self.done and len(self.live[0]) >= self.max_tokens:
            for beam, score in zip(self.live, self.scores.tolist(), strict=True):
                self._answer(beam, score)
            self.done = True
        return ([], []) if self.done else ([parents[rank] for rank in going], [tokens[rank] for rank in going])

    def _continuations(self, logits: np.ndarray) -> tuple[list[int], list[int], list[float]]:
        """The 2·width likeliest continuations of all beams together; of equals, that of the better beam, then the lower id."""
        count = min(2 * self.width, logits.shape[1])
        rows = fold(logits)
        best = largest(rows, np.full(len(logits), count))
        ids, found = best.ids[:, :count], best.logits[:, :count]
        norm = rows.best + np.log(totals(rows, np.ones(len(logits))))
        scores = self.scores[:, None] + found - norm[:, None]
        flat = scores.ravel()
        order = np.argsort(-flat, kind="stable")[: 2 * self.width]
        order = order[flat[order] > -np.inf]
        return (order // ids.shape[1]).tolist(), ids.ravel()[order].tolist(), flat[order].tolist()

    def _answer(self, tokens: tuple[int, ...], score: float) -> None:
        beam = Beam(tokens, score / len(tokens) ** self.length_penalty)
        self.answers = sorted([*self.answers, beam], key=lambda b: -b.score)[: self.width]

    def _settled(self) -> bool:
        """Log-probabilities only fall; with a penalty above 0 the longest answer makes the most of what a beam has."""
        longest = self.max_tokens if self.length_penalty > 0 else len(self.live[0]) + 1
        return (
            len(self.answers) == self.width and self.scores[0] / longest**self.length_penalty <= self.answers[-1].score
        )
