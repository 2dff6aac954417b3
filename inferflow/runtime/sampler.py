"""Choosing the next token: greedy, or from the distribution that temperature, top-k, top-p and min-p leave.

Randomness is a function of (seed, sequence index, position) alone, so an answer does not depend on what ran beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ArgumentError
from ..spec.expression import show

__all__ = ["SamplingParams", "probabilities", "sample"]


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Values out of range raise ArgumentError before anything runs.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off; `seed` None draws a fresh one; `max_tokens` None is
    128, or what fits; `stop` are strings that end the text (and are not part of it).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._normalise()
        stops: Sequence[object] = self.stop
        checks: list[tuple[str, bool, str]] = [
            ("temperature", _number(self.temperature) and 0 <= self.temperature <= 100, "a number from 0 to 100"),
            ("top_k", _whole(self.top_k) and self.top_k >= 0, "a whole number, 0 for off"),
            ("top_p", _number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", _number(self.min_p) and 0 <= self.min_p < 1, "at least 0 and below 1"),
            (
                "seed",
                self.seed is None or (_whole(self.seed) and 0 <= self.seed < 1 << 64),
                "a whole number below 2^64",
            ),
            ("max_tokens", self.max_tokens is None or (_whole(self.max_tokens) and self.max_tokens > 0), "at least 1"),
            (
                "stop",
                isinstance(stops, tuple) and all(isinstance(s, str) and s for s in stops) and len(stops) <= 64,
                "up to 64 strings, none empty",
            ),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "True or False"),
        ]
        for name, good, want in checks:
            if not good:
                raise ArgumentError(f"it is {show(getattr(self, name))}", where=name, fix=f"it must be {want}")

    def _normalise(self) -> None:
        """NumPy's numbers become Python's; one stop string, none, or any collection of them becomes a tuple."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, np.integer | np.floating):
                object.__setattr__(self, name, value.item())
        given: object = self.stop
        stop = () if given is None else (given,) if isinstance(given, str) else given
        if isinstance(stop, Iterable) and not isinstance(stop, bytes):
            object.__setattr__(self, "stop", tuple(stop))


def _number(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole or (isinstance(value, float) and math.isfinite(value))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution over the vocabulary (float64, sums to 1). The filters apply in the order top-k, top-p, min-p, on the
    distribution at the given temperature."""
    scores = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # the greatest is 0 at any temperature, however small; others may become -inf
        scores = (scores - scores.max()) / params.temperature
    if 0 < params.top_k < len(scores):
        kth = np.partition(scores, -params.top_k)[-params.top_k]
        scores = np.where(scores >= kth, scores, -np.inf)
    p = np.exp(scores)
    p /= p.sum()
    if params.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0  # the token that crosses the line stays
    if params.min_p > 0:
        p[p < params.min_p * p.max()] = 0
    return np.asarray(p / p.sum())


def sample(logits: np.ndarray, params: SamplingParams, seed: int, position: int) -> int:
    """The next token's id from `logits` [vocab], at a temperature above 0."""
    p = probabilities(logits, params)
    draw = np.random.default_rng([seed, position]).random()
    return int(min(np.searchsorted(np.cumsum(p), draw, side="right"), np.flatnonzero(p)[-1]))
