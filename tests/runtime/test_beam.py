"""Beam search on a chain whose every text can be enumerated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from inferflow.errors import ArgumentError
from inferflow.runtime.beam import BeamSearch
from inferflow.runtime.sampler import Top, log_probabilities

VOCAB, END, LENGTH = 5, 0, 5
CHAIN = (2 * np.random.default_rng(4).standard_normal((VOCAB, VOCAB))).astype(np.float32)  # logits after each token
LOGP = CHAIN - np.log(np.exp(CHAIN.astype(np.float64)).sum(axis=1, keepdims=True))


def every_answer(penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """All texts that end, or have LENGTH tokens, after token 1; the best first."""
    out = []
    for length in range(1, LENGTH + 1):
        for text in itertools.product(range(VOCAB), repeat=length):
            if END not in text[:-1] and (text[-1] == END or length == LENGTH):
                score = sum(LOGP[a, b] for a, b in itertools.pairwise((1, *text)))
                out.append((float(score) / length**penalty, text))
    return sorted(out, reverse=True)


def tops(logits: np.ndarray, count: int) -> list[Top]:
    """What the engine tells of rows of logits."""
    rows = len(logits)
    return [top for _, top in log_probabilities(logits, [0] * rows, [count] * rows)]


def search(width: int, penalty: float = 1.0) -> BeamSearch:
    beams = BeamSearch(width, [END], LENGTH, penalty)
    last = [1]
    texts: list[list[int]] = [[]]
    while not beams.done:
        parents, tokens = beams.step(tops(CHAIN[last], 2 * width))
        texts = [[*texts[p], t] for p, t in zip(parents, tokens, strict=True)]
        last = tokens
        if not beams.done:
            assert [tuple(text) for text in texts] == beams.live
            assert len(texts) <= width
    return beams


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_a_wide_search_finds_the_best_answer(penalty: float) -> None:
    want = every_answer(penalty)
    found = search(100, penalty).answers
    assert found[0].tokens == want[0][1]
    assert found[0].score == pytest.approx(want[0][0], abs=1e-5)
    known = {text: score for score, text in want}
    for beam in found:
        assert beam.score == pytest.approx(known[beam.tokens], abs=1e-5)


def test_one_beam_is_greedy() -> None:
    text, last = [], 1
    while last != END and len(text) < LENGTH:
        last = int(CHAIN[last].argmax())
        text.append(last)
    assert search(1).answers[0].tokens == tuple(text)


def test_wider_is_no_worse() -> None:
    best = [search(width, 0.0).answers[0].score for width in (1, 4, 16, 64)]
    assert best == sorted(best)


def test_nothing_is_kept_that_cannot_be() -> None:
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, 3] = 0
    beams = BeamSearch(4, [END], 3)
    assert beams.step(tops(logits, 8)) == ([0], [3])
    logits[0, END] = 100
    logits[0, 3] = -np.inf
    assert beams.step(tops(logits, 8)) == ([], [])
    assert beams.done
    assert [b.tokens for b in beams.answers] == [(3, END)]


def test_bad_input_is_refused() -> None:
    for width in (0, 1.5, True, 1000):
        with pytest.raises(ArgumentError, match=r"^width"):
            BeamSearch(width, [END], 3)  # type: ignore[arg-type]
