"""What the text so far does to the next logits: bias, penalties for repetition, forbidden tokens; and the anti-LM of FSD."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from .sampling_params import SamplingParams

__all__ = ["AntiLM", "adjusts", "dry", "forbidden", "penalise"]

Array = np.ndarray

MAX_MATCH = 64  # no repeat is followed further back


def adjusts(p: SamplingParams) -> bool:
    """Whether a row's logits are changed at all (constraints and `min_tokens` apart)."""
    return (
        bool(p.logit_bias) or p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        or p.dry_multiplier > 0 or p.allowed_token_ids is not None or bool(p.bad_token_ids)
    )  # fmt: skip


def penalise(logits: Array, p: SamplingParams, ids: Sequence[int], seen: Array, generated: Counter[int]) -> None:
    """Changes `logits` [vocab] in place, in this order: bias, repetition, frequency and presence, DRY.

    `ids`: prompt and answer; `seen`: the different ones, int64; `generated`: how often each came in the answer.
    Repetition (Keskar et al. 2019, arXiv:1909.05858) counts the prompt, frequency and presence (OpenAI) do not.
    """
    for token, bias in p.logit_bias.items():
        logits[token] += np.float32(bias)
    if p.repetition_penalty != 1:
        here = logits[seen]
        penalty = np.float32(p.repetition_penalty)
        logits[seen] = np.where(here > 0, here / penalty, here * penalty)
    if (p.frequency_penalty != 0 or p.presence_penalty != 0) and generated:
        tokens = np.fromiter(generated, np.int64, len(generated))
        counts = np.fromiter(generated.values(), np.float32, len(generated))
        logits[tokens] -= counts * np.float32(p.frequency_penalty) + np.float32(p.presence_penalty)
    if p.dry_multiplier > 0:
        for token, length in dry(ids, p).items():
            power = p.dry_base ** (length - p.dry_allowed_length)
            logits[token] -= np.float32(min(p.dry_multiplier * power, 1e9))


def dry(ids: Sequence[int], p: SamplingParams) -> dict[int, int]:
    """The tokens that would continue a repeat, and its length so far: for each earlier place where the text ends as it ends
    now, for `dry_allowed_length` tokens or more, what came next. Weidmann, "Don't Repeat Yourself" (2024), as in
    text-generation-webui."""
    text = np.asarray(ids if p.dry_penalty_last_n < 0 else ids[max(0, len(ids) - p.dry_penalty_last_n) :], np.int64)
    reach = np.zeros(max(len(text) - 1, 0), np.int64)  # how long the repeat is that ends at each place
    places = np.arange(len(reach))
    for length in range(1, min(len(text), MAX_MATCH + 1)):
        last = int(text[-length])
        places = places[places >= length - 1]
        places = places[text[places - (length - 1)] == last]
        if not len(places) or last in p.dry_breaker_ids:
            break
        reach[places] = length
    repeats = np.flatnonzero(reach >= p.dry_allowed_length)
    repeats = repeats[np.argsort(reach[repeats], kind="stable")]  # of one token's, the longest comes last and stays
    found = dict(zip(text[repeats + 1].tolist(), reach[repeats].tolist(), strict=True))
    return {token: length for token, length in found.items() if token not in p.dry_breaker_ids}


def forbidden(p: SamplingParams, ids: Sequence[int]) -> list[int]:
    """The last tokens of those `bad_token_ids` whose others are what the text ends with."""
    words = [word if isinstance(word, Sequence) else (word,) for word in p.bad_token_ids]
    return [w[-1] for w in words if len(w) == 1 or tuple(ids[-(len(w) - 1) :]) == tuple(w[:-1])]


class AntiLM:
    """An n-gram model of the text so far, smoothed from the longest context down: Yang et al., A Frustratingly Simple Decoding
    Method for Neural Text Generation (2023), arXiv:2305.12675."""

    def __init__(self, n: int, beta: float, ids: Iterable[int] = ()) -> None:
        self.beta = beta
        self.counts: list[dict[tuple[int, ...], Counter[int]]] = [{} for _ in range(n)]  # by the length of the context
        self.tail: list[int] = []
        for token in ids:
            self.push(token)

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        for length, counts in enumerate(self.counts[: len(self.tail) + 1]):
            counts.setdefault(self.context(length), Counter())[token] += 1
        self.tail = [*self.tail, token][1 - len(self.counts) :] if len(self.counts) > 1 else []

    def context(self, length: int) -> tuple[int, ...]:
        return tuple(self.tail[len(self.tail) - length :])

    def probability(self, token: int) -> float:
        """How much the text so far would make one expect `token` next: each order takes the share `beta` of what the longer
        ones, where they know the token, have left. One is added to an n-gram's total: what was seen once counts half."""
        if len(self.tail) < len(self.counts) - 1:
            return 0.0
        left, score = 1.0, 0.0
        for length in range(len(self.counts) - 1, -1, -1):
            counts = self.counts[length].get(self.context(length))
            if counts is None or not counts[token]:
                continue
            if length:
                score += left * self.beta * counts[token] / (counts.total() + 1)
            else:
                score += left * counts[token] / counts.total()
            left *= 1 - self.beta
        return score
