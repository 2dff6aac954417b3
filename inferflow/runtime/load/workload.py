"""Requests as they arrive: how many, when, how long. All of it follows from the seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import ArgumentError, did_you_mean
from ...spec.expression import show

__all__ = ["Lengths", "Request", "Workload", "workload"]

CUT = 3.0  # standard deviations from the mean, beyond which a normal length is cut off
LONGEST = 1 << 20
_NUMBERS = {"fixed": "N", "normal": "MEAN:SD", "uniform": "LOW:HIGH", "pareto": "SHAPE:LOW:HIGH"}


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: ``fixed:N``; ``normal:MEAN:SD``, between 1 and three standard deviations above the mean;
    ``uniform:LOW:HIGH``, both among them; ``pareto:SHAPE:LOW:HIGH``, the bounded Pareto distribution, whose tail is the heavier
    the smaller the shape is. `parse` makes them."""

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ArgumentError."""
        kind, *words = text.split(":")
        form = f"{kind}:{_NUMBERS[kind]}" if kind in _NUMBERS else ", ".join(f"{k}:{n}" for k, n in _NUMBERS.items())
        try:
            numbers = tuple(float(word) for word in words)
        except ValueError:
            numbers = ()
        lengths = cls(kind, numbers)
        if not lengths._good():
            fix = did_you_mean(kind, _NUMBERS) if kind not in _NUMBERS else ""
            raise ArgumentError(f"{show(text)} are no lengths", where="lengths", fix=fix or f"write {form}")
        return lengths

    def _good(self) -> bool:
        """Whether they are of the form that their kind has, from 1 to `LONGEST` tokens."""
        if not all(math.isfinite(number) for number in self.numbers):
            return False
        match self.kind, self.numbers:
            case "fixed", (count,):
                return 1 <= count <= LONGEST and count == int(count)
            case "normal", (mean, deviation):
                return mean >= 1 and deviation >= 0 and mean + CUT * deviation <= LONGEST
            case "uniform", (low, high):
                return 1 <= low <= high <= LONGEST and low == int(low) and high == int(high)
            case "pareto", (shape, low, high):
                return 0 < shape <= 100 and 1 <= low < high <= LONGEST
        return False

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{number:g}" for number in self.numbers)])

    @property
    def longest(self) -> int:
        """No length is greater."""
        if self.kind == "normal":
            return math.ceil(self.numbers[0] + CUT * self.numbers[1])
        return int(self.numbers[-1])

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """So many lengths."""
        match self.kind, self.numbers:
            case "normal", (mean, deviation):
                drawn = np.clip(np.rint(rng.normal(mean, deviation, count)), 1, self.longest)
            case "uniform", (low, high):
                drawn = rng.integers(int(low), int(high) + 1, count).astype(float)
            case "pareto", (shape, low, high):  # the inverse of its distribution function
                drawn = np.floor(low * (1 - rng.random(count) * (1 - (low / high) ** shape)) ** (-1 / shape))
            case _:
                drawn = np.full(count, self.numbers[0])
        return [int(n) for n in drawn]


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, and how many new ones it wants. It arrives `at` so many seconds after the start."""

    prompt: tuple[int, ...]
    output: int
    at: float = 0.0


@dataclass(frozen=True)
class Workload:
    """`requests` in the order in which they arrive. `clients` None is an open loop, where each arrives when it says; else at
    most so many are on their way, and the next one comes as soon as one has ended: a closed loop of clients that never rest."""

    requests: tuple[Request, ...]
    clients: int | None = None


def workload(
    count: int,
    prompt: Lengths,
    output: Lengths,
    *,
    ids: range,
    seed: int | Sequence[int],
    rate: float | None = None,
    clients: int | None = None,
) -> Workload:
    """`count` requests with prompts of random `ids`. With a `rate` they arrive so many a second, as a Poisson process, the
    first at once; without, all at once, or as the `clients` send them. The same seed gives the same requests at any rate, at
    times that are in proportion."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0, count)
    times = (np.cumsum(gaps) - gaps[0]) / rate if rate else np.zeros(count)
    prompts, outputs = prompt.draw(rng, count), output.draw(rng, count)
    requests = (
        Request(tuple(rng.integers(ids.start, ids.stop, size).tolist()), new, float(at))
        for size, new, at in zip(prompts, outputs, times, strict=True)
    )
    return Workload(tuple(requests), clients)
