"""One request on its way through the loop, and what a step tells about it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

from ..errors import InferflowError
from .sampler import SamplerState, SamplingParams, Top
from .swap import Saved

__all__ = ["Event", "Sequence"]


@dataclass(eq=False)
class Sequence:
    """One request. `ids` is the prompt and what came after it, the list of its `sampler`; `past` how many of them are in the
    cache.

    It is resident while it has a `slot`; else it waits, with its keys and values `saved` or to be computed.
    """

    ids: list[int]
    params: SamplingParams
    limit: int  # tokens it may have in all
    sampler: SamplerState
    prompt: int
    arrival: int  # its number: earlier ones are smaller
    priority: int = 0  # smaller goes first
    deadline: float | None = None  # of the engine's clock
    root: bytes = b""  # the digest that its chain begins with
    parent: Sequence | None = None  # whose blocks it can share when it starts
    common: int = 0  # tokens that it has in common with its parent and need not compute

    past: int = 0
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of full blocks, as far as they were needed
    remembered: int = 0  # blocks that the pool knows
    begun: bool = False  # resident, and no token came yet of what it took to start
    saved: Saved | None = None
    cached: int | None = None  # tokens that were in the cache when it first started
    finish: str | None = None
    inbox: deque[Event] = field(default_factory=deque)  # of its owner, who may be another than who steps the engine
    owner: ReferenceType[Any] | None = None
    prompt_logprobs: list[tuple[int, float, Top]] | None = (
        None  # of its prompt's tokens but the first, where it asks for them
    )

    arrived: float = 0.0  # when, by the engine's clock, as below
    started: float | None = None
    first: float | None = None  # its first new token
    latest: float | None = None  # its latest

    level: int = 0  # of a policy with queues
    used: float = 0.0  # of its quantum there
    last: int = 0  # the step that last ran it

    @property
    def todo(self) -> int:
        """Tokens that are not in the cache: one while it decodes."""
        return len(self.ids) - self.past

    @property
    def unscored(self) -> bool:
        """Whether tokens of its prompt have still to be scored, which needs their logits."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt - 1


@dataclass(frozen=True)
class Event:
    """One new token of `sequence`, or its end (`token` None). `finish` is ``stop``, ``length``, or ``error`` or ``deadline``
    (both with `error`) on the last one."""

    sequence: Sequence
    token: int | None
    finish: str | None
    error: InferflowError | None = None
    logprob: float | None = None  # of the token, where the request asks for it
    top: Top = ()  # the likeliest tokens, with theirs

    def told(self) -> Top:
        """`top`. Raises the error, if it is one."""
        if self.error is not None:
            raise self.error
        return self.top
