"""Who goes first: policies over sequences, as order alone. They hold nothing but their own constants.

A policy ranks all sequences by `key`, smallest first. The scheduler runs the best that fit; where blocks run out, the worst
give theirs up. A policy whose newcomers never outrank what runs therefore never preempts but for want of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError, did_you_mean
from ..spec.expression import show
from .sequence import Sequence

__all__ = ["POLICIES", "Fcfs", "MultiLevelFeedbackQueue", "Policy", "Priority", "Sequential", "Static", "policy"]


class Policy:
    """First come, first served, and what the others change. `width`: the most sequences of a step. `patience`: after so many
    steps in which it did not run, a sequence is promoted. `proactive`: blocks of those that pause are freed before they are
    wanted."""

    width: int | None = None
    patience: int | None = None
    proactive = False

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Its rank. No two sequences have the same."""
        return (sequence.arrival,)

    def admits(self, running: int) -> bool:
        """Whether sequences may start beside so many others."""
        return True

    def arrive(self, sequence: Sequence) -> None:
        """It joins."""

    def ran(self, sequence: Sequence, tokens: int) -> None:
        """A step computed so many tokens of it."""

    def promote(self, sequence: Sequence) -> None:
        """It has starved."""


class Fcfs(Policy):
    """First come, first served."""


class Priority(Policy):
    """The smallest `priority` first, then first come. A sequence waits for as long as better ones come."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        return sequence.priority, sequence.arrival


class Sequential(Policy):
    """One after another: a baseline."""

    width = 1


class Static(Policy):
    """A batch of what waits, and no other before all of it has ended: a baseline."""

    def admits(self, running: int) -> bool:
        return running == 0


@dataclass(frozen=True)
class MultiLevelFeedbackQueue(Policy):
    """Skip-join multi-level feedback queues (FastServe, arXiv 2305.05920): short answers overtake long ones, unknown as their
    lengths are.

    Level n has a quantum of ``quantum · 2ⁿ``, in the cost of a token that decodes; a token of a prompt costs `prompt_cost`. A
    sequence joins the first level whose quantum pays for its prompt, and sinks by one when its quantum is used. One that no
    step has run for `patience` steps goes to level 0, where the oldest are first. A prompt that was begun is finished, as an
    iteration is in the paper: else two sequences that have no room beside each other might throw out one another for ever,
    each before it has come to a new token.
    """

    quantum: float = 16.0
    prompt_cost: float = 1 / 16
    levels: int = 8
    patience: int = 256
    proactive = True

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        return -1 if sequence.begun else sequence.level, sequence.arrival

    def arrive(self, sequence: Sequence) -> None:
        cost = self.cost(sequence.todo)
        fits = (level for level in range(self.levels) if self.quantum * 2**level >= cost)
        sequence.level, sequence.used = next(fits, self.levels - 1), 0.0

    def ran(self, sequence: Sequence, tokens: int) -> None:
        sequence.used += self.cost(tokens)
        if sequence.used >= self.quantum * 2**sequence.level and sequence.level < self.levels - 1:
            sequence.level, sequence.used = sequence.level + 1, 0.0

    def promote(self, sequence: Sequence) -> None:
        sequence.level, sequence.used = 0, 0.0

    def cost(self, tokens: int) -> float:
        return 1.0 if tokens == 1 else tokens * self.prompt_cost


POLICIES: dict[str, type[Policy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "mlfq": MultiLevelFeedbackQueue,
    "sequential": Sequential,
    "static": Static,
}


def policy(asked: object) -> Policy:
    """The policy of that name; one with constants of its own is given as it is. Raises ArgumentError."""
    if isinstance(asked, Policy):
        return asked
    if isinstance(asked, str) and asked in POLICIES:
        return POLICIES[asked]()
    fix = did_you_mean(asked[:100], POLICIES) if isinstance(asked, str) else ""
    fix = fix or f"use one of {', '.join(POLICIES)}"
    raise ArgumentError(f"there is no policy {show(asked)}", where="policy", fix=fix)
