"""How far a model's predictions are from a reference's: perplexity and Kullback-Leibler divergence over windows of a text,
of which the second half is scored, so that every scored token has a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .peers import Floats

__all__ = ["Logits", "Quality", "quality", "windows"]

# (tokens, first) -> [len(tokens) - first, vocabulary]: as `Scorer.logits`
Logits = Callable[[Sequence[int], int], Floats]


class Quality(NamedTuple):
    """Means over all scored tokens."""

    perplexity: float
    divergence: float  # of the model from the reference, in nats
    same_top: float  # the share of tokens where both find the same one likeliest


def windows(tokens: Sequence[int], count: int, size: int = 512) -> list[Sequence[int]]:
    """The first `count` windows, one after the other; ValueError if there are fewer."""
    if len(tokens) < count * size:
        raise ValueError(f"{len(tokens)} tokens are fewer than {count} windows of {size}")
    return [tokens[at : at + size] for at in range(0, count * size, size)]


def quality(model: Logits, reference: Logits, texts: Sequence[Sequence[int]]) -> Quality:
    """Both see the same windows. A position's target is the token after it, so the last one of a window is not scored.
    A vocabulary that one of them pads is cut to the other's."""
    losses, divergences, tops = [], [], []
    for tokens in texts:
        first = len(tokens) // 2
        targets = np.asarray(tokens[first + 1 :])
        a, b = (logits(tokens, first)[:-1] for logits in (model, reference))
        size = min(a.shape[1], b.shape[1])
        mine, its = _log_softmax(a[:, :size]), _log_softmax(b[:, :size])
        losses.append(-mine[np.arange(len(targets)), targets])
        divergences.append((np.exp(its) * (its - mine)).sum(1))
        tops.append(mine.argmax(1) == its.argmax(1))
    loss, divergence, top = (float(np.concatenate(each).mean()) for each in (losses, divergences, tops))
    return Quality(float(np.exp(loss)), divergence, top)


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result
