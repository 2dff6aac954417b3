"""What the text so far does to the next logits: bias, penalties for repetition, forbidden tokens; and the anti-LM of FSD."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from .sampling_params import SamplingParams

__all__ = ["AntiLM", "Counts", "Repeats", "adjusts", "forbidden", "penalise"]

Array = np.ndarray

MAX_MATCH = 64  # no repeat is followed further back


def adjusts(p: SamplingParams) -> bool:
    """Whether a row's logits are changed at all (constraints and `min_tokens` apart)."""
    return (
        bool(p.logit_bias) or p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        or p.dry_multiplier > 0 or p.allowed_token_ids is not None or bool(p.bad_token_ids)
    )  # fmt: skip


def penalise(
    logits: Array, p: SamplingParams, seen: Counts | None, generated: Counts | None, repeats: Repeats | None
) -> None:
    """Changes `logits` [vocab] in place, in this order: bias, repetition, frequency and presence, DRY; the last three where
    there are the tokens of prompt and answer (`seen`), of the answer (`generated`), and the text's `repeats`.

    Repetition (Keskar et al. 2019, arXiv:1909.05858) counts the prompt, frequency and presence (OpenAI) do not.
    """
    if p.logit_bias:
        biased = np.fromiter(p.logit_bias, np.int64, len(p.logit_bias))
        logits[biased] += np.fromiter(p.logit_bias.values(), np.float32, len(biased))
    if seen is not None:
        tokens, penalty = seen.tokens, np.float32(p.repetition_penalty)
        here = logits[tokens]
        logits[tokens] = np.where(here > 0, here / penalty, here * penalty)
    if generated is not None:
        logits[generated.tokens] -= generated.counts * np.float32(p.frequency_penalty) + np.float32(p.presence_penalty)
    if repeats is not None:
        for token, length in repeats.longest().items():
            power = p.dry_base ** (length - p.dry_allowed_length)
            logits[token] -= np.float32(min(p.dry_multiplier * power, 1e9))


def forbidden(p: SamplingParams, ids: Sequence[int]) -> list[int]:
    """The last tokens of those `bad_token_ids` whose others are what the text ends with."""
    words = [word if isinstance(word, Sequence) else (word,) for word in p.bad_token_ids]
    return [w[-1] for w in words if len(w) == 1 or tuple(ids[-(len(w) - 1) :]) == tuple(w[:-1])]


class Counts:
    """How often each token of a text came. No step walks over the text: its tokens are kept as they are asked for."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._tokens, self._counts = array("q"), array("f")
        for token in ids:
            self.push(token)

    @property
    def tokens(self) -> Array:
        """The different tokens, int64 [n]."""
        return np.array(self._tokens, np.int64)

    @property
    def counts(self) -> Array:
        """How often each of `tokens` came, float32 [n]."""
        return np.array(self._counts, np.float32)

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        place = self._places.setdefault(token, len(self._tokens))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0)
        self._counts[place] += 1


class Repeats:
    """The earlier places where the text ends as it ends now, for `dry_allowed_length` tokens or more, and what came next.
    Weidmann, "Don't Repeat Yourself" (2024), as in text-generation-webui. A step costs as much as there are such places: a
    repeat that was known has grown by one, another is measured."""

    def __init__(self, p: SamplingParams, ids: Iterable[int] = ()) -> None:
        self.least = p.dry_allowed_length
        self.most = max(self.least, MAX_MATCH)
        self.window = p.dry_penalty_last_n  # -1: all
        self.breakers = frozenset(p.dry_breaker_ids)
        self.ids: list[int] = []
        self.unbroken = 0  # tokens since the last breaker
        self.ends: dict[tuple[int, ...], list[int]] = {}  # where each run of `least` tokens without a breaker ends
        self.known = 0  # how long the text was when `lengths` and `found` were told
        self.lengths: dict[int, int] = {}  # of the repeat that ends at each place
        self.found: dict[int, int] = {}
        for token in ids:
            self.push(token)

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        self.ids.append(token)
        self.unbroken = 0 if token in self.breakers else self.unbroken + 1
        if self.unbroken >= self.least:
            self.ends.setdefault(tuple(self.ids[-self.least :]), []).append(len(self.ids) - 1)

    def longest(self) -> dict[int, int]:
        """The tokens that would continue a repeat, and the length of the longest of theirs so far."""
        if self.known == len(self.ids):
            return self.found
        before = self.lengths if self.known == len(self.ids) - 1 else {}
        self.known, self.lengths, self.found = len(self.ids), {}, {}
        start = max(0, len(self.ids) - self.window) if self.window >= 0 else 0
        places = self.ends[tuple(self.ids[-self.least :])] if self.unbroken >= self.least else []
        for place in reversed(places[:-1]):  # the last is the end itself
            if place < start + self.least - 1:
                break
            length = min(before[place - 1] + 1, self.most) if place - 1 in before else self._measure(place)
            self.lengths[place] = length
            token, inside = self.ids[place + 1], min(length, place - start + 1)
            if inside > self.found.get(token, 0) and token not in self.breakers:
                self.found[token] = inside
        return self.found

    def _measure(self, place: int) -> int:
        """How long the repeat is that ends at `place`; at least `least`."""
        length, limit = self.least, min(self.unbroken, self.most, place + 1)
        while length < limit and self.ids[place - length] == self.ids[-1 - length]:
            length += 1
        return length


class AntiLM:
    """An n-gram model of the text so far, smoothed from the longest context down: Yang et al., A Frustratingly Simple Decoding
    Method for Neural Text Generation (2023), arXiv:2305.12675."""

    def __init__(self, n: int, beta: float, ids: Iterable[int] = ()) -> None:
        self.n = n
        self.beta = beta
        self.counts: dict[tuple[int, ...], Counter[int]] = {}  # of what came after each context of up to n - 1 tokens
        self.totals: Counter[tuple[int, ...]] = Counter()
        self.tail: list[int] = []
        for token in ids:
            self.push(token)

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        for length in range(len(self.tail) + 1):
            context = self.context(length)
            self.counts.setdefault(context, Counter())[token] += 1
            self.totals[context] += 1
        self.tail = [*self.tail, token][1 - self.n :] if self.n > 1 else []

    def context(self, length: int) -> tuple[int, ...]:
        return tuple(self.tail[len(self.tail) - length :])

    def probability(self, token: int) -> float:
        """How much the text so far would make one expect `token` next: each order takes the share `beta` of what the longer
        ones, where they know the token, have left. One is added to an n-gram's total: what was seen once counts half."""
        if len(self.tail) < self.n - 1:
            return 0.0
        left, score = 1.0, 0.0
        for length in range(self.n - 1, -1, -1):
            context = self.context(length)
            count = self.counts[context][token] if context in self.counts else 0
            if not count:
                continue
            if length:
                score += left * self.beta * count / (self.totals[context] + 1)
            else:
                score += left * count / self.totals[context]
            left *= 1 - self.beta
        return score
