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
    """First come, first served, where a policy does not say otherwise. `width`: the most sequences of a step. `patience`: a
    sequence that has not run for so many steps is promoted (None: never). `proactive`: blocks of those that pause are freed
    before they are wanted."""

    width: int | None = None
    patience: int | None = None
    proactive = False

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Its rank. No two sequences have the same."""
        return (sequence.arrival,)

    def admits(self, running: int) -> bool:
        """Whether sequences may start while so many run."""
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

    It pays where requests wait because a step takes few of them (`width`). Where they wait for blocks, those that pause should
    go to a file (`swap_bytes`): to compute them again costs more than their pausing saved.
    """

    # Chosen for mean latency a token at a load of 0.95, with answers from a Pareto distribution (`tests/bench/serving.py`, and
    # the same on a model of its step times). Quanta from 2 to 32 tokens differ by less than a tenth: 16 pauses least often of
    # those that let a short answer overtake.
    quantum: float = 16.0
    # A CPU computes a token of a prompt for three quarters of one that decodes. But at that price long prompts sink below short
    # ones, and what they wait shows at P99 (2 to 3 times as much) while the mean gains nothing.
    prompt_cost: float = 1 / 16
    levels: int = 8  # the last one begins after 16 · (2⁷ - 1) = 2032 tokens
    # Only what bounds starvation: under overload (1.2 to 1.4) 256 brings back so many long ones that the mean is a fifth worse,
    # 4096 is no better than 1024.
    patience: int = 1024
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
