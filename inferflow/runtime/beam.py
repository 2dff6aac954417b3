"""Beam search: what to keep, of which parent, and when to stop.

The beams run as sequences of one batch. `BeamSearch` is told how likely their next tokens are and says what the next beams
are: beam i goes on from old beam ``parents[i]`` with ``tokens[i]``, which `next_beams` makes a copy-on-write fork.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..errors import ArgumentError
from ..spec.expression import show
from .engine import Engine, Event
from .engine import Sequence as Running
from .sampler import Top
from .sampling_params import whole

__all__ = ["Beam", "BeamSearch", "next_beams"]


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
            raise ArgumentError(f"it is {show(width)}", where="width", fix="it must be a whole number from 1 to 128")
        self.width = width
        self.ends = frozenset(ends)
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.live: list[tuple[int, ...]] = [()]
        self.scores = [0.0]  # log-probabilities of the live beams
        self.answers: list[Beam] = []  # the best first
        self.done = False

    def step(self, tops: Sequence[Top]) -> tuple[list[int], list[int]]:
        """Parents and tokens of the next beams, the best first; both empty when the search is done. `tops`: of each live beam
        its likeliest next tokens, the best first, with their log-probabilities: 2·width of them, or all that are possible."""
        parents, tokens, scores = self._continuations(tops)
        going: list[int] = []
        for rank, (parent, token, score) in enumerate(zip(parents, tokens, scores, strict=True)):
            if token in self.ends:
                if rank < self.width:
                    self._answer((*self.live[parent], token), score)
            elif len(going) < self.width:
                going.append(rank)
        self.live = [(*self.live[parents[rank]], tokens[rank]) for rank in going]
        self.scores = [scores[rank] for rank in going]
        self.done = not going or self._settled()
        if not self.done and len(self.live[0]) >= self.max_tokens:
            for beam, score in zip(self.live, self.scores, strict=True):
                self._answer(beam, score)
            self.done = True
        return ([], []) if self.done else ([parents[rank] for rank in going], [tokens[rank] for rank in going])

    def _continuations(self, tops: Sequence[Top]) -> tuple[list[int], list[int], list[float]]:
        """The 2·width likeliest continuations of all beams together; of equals, that of the better beam, then the earlier."""
        found = [
            (score + logprob, parent, token)
            for parent, (score, top) in enumerate(zip(self.scores, tops, strict=True))
            for token, logprob in top[: 2 * self.width]
        ]
        found = sorted(found, key=lambda one: -one[0])[: 2 * self.width]
        return [parent for _, parent, _ in found], [token for *_, token in found], [score for score, *_ in found]

    def _answer(self, tokens: tuple[int, ...], score: float) -> None:
        beam = Beam(tokens, score / len(tokens) ** self.length_penalty)
        self.answers = sorted([*self.answers, beam], key=lambda b: -b.score)[: self.width]

    def _settled(self) -> bool:
        """Log-probabilities only fall; with a penalty above 0 the longest answer makes the most of what a beam has."""
        longest = self.max_tokens if self.length_penalty > 0 else len(self.live[0]) + 1
        return (
            len(self.answers) == self.width and self.scores[0] / longest**self.length_penalty <= self.answers[-1].score
        )


def next_beams(
    engine: Engine,
    search: BeamSearch,
    beams: Sequence[Running],
    events: Sequence[Event],
    parents: Sequence[int],
    tokens: Sequence[int],
) -> tuple[list[Running], list[Running]]:
    """The sequences of the live beams, and those of old ones that ended: to be aborted when there is news of all of the
    others, since their forks take over blocks of sequences that still have them.

    A beam whose next token is what its sequence chose, too, goes on in it."""
    kept: set[int] = set()
    out = []
    for parent, token, text in zip(parents, tokens, search.live if parents else [], strict=True):
        beam = beams[parent]
        if parent not in kept and token == events[parent].token:
            kept.add(parent)
            out.append(beam)
        else:
            out.append(engine.fork(beam, 0, [*beam.ids[: beam.prompt], *text]))
    return out, [beam for n, beam in enumerate(beams) if n not in kept]
