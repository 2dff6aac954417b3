"""What the text so far does to the logits, against the definitions written plainly."""

from __future__ import annotations

import numpy as np
import pytest

from inferflow.runtime.penalties import AntiLM, Counts, Repeats, forbidden, penalise
from inferflow.runtime.sampling_params import SamplingParams

PROMPT, ANSWER = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5]


def penalised(x: np.ndarray, **options: object) -> np.ndarray:
    out = x.copy()
    penalise(out, SamplingParams(**options), Counts(PROMPT + ANSWER), Counts(ANSWER), None)  # type: ignore[arg-type]
    return out


def test_repetition_presence_and_frequency() -> None:
    x = np.random.default_rng(0).standard_normal(12).astype(np.float32)
    want = [v if i not in PROMPT + ANSWER else v / 1.3 if v > 0 else v * 1.3 for i, v in enumerate(x)]
    np.testing.assert_allclose(penalised(x, repetition_penalty=1.3), want, rtol=1e-6)
    want = [v - 0.4 * ANSWER.count(i) - 0.7 * (i in ANSWER) for i, v in enumerate(x)]
    np.testing.assert_allclose(penalised(x, frequency_penalty=0.4, presence_penalty=0.7), want, rtol=1e-5)
    want = [v + {2: 5, 11: -100}.get(i, 0) for i, v in enumerate(x)]
    np.testing.assert_allclose(penalised(x, logit_bias={2: 5, 11: -100}), want, rtol=1e-6)
    np.testing.assert_array_equal(penalised(x), x)


def longest_repeats(ids: list[int], p: SamplingParams) -> dict[int, int]:
    """For every token, the longest end of the text that it has followed before."""
    found: dict[int, int] = {}
    text = ids if p.dry_penalty_last_n < 0 else ids[len(ids) - min(len(ids), p.dry_penalty_last_n) :]
    for at in range(1, len(text)):
        length = 0
        while length < at and text[at - 1 - length] == text[-1 - length] and text[-1 - length] not in p.dry_breaker_ids:
            length += 1
        if length >= p.dry_allowed_length and text[at] not in p.dry_breaker_ids:
            found[text[at]] = max(found.get(text[at], 0), length)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {}, {"dry_penalty_last_n": 12}, {"dry_penalty_last_n": 0}, {"dry_breaker_ids": [2]}, {"dry_allowed_length": 1},
        {"dry_allowed_length": 4}, {"dry_breaker_ids": [0], "dry_penalty_last_n": 20, "dry_allowed_length": 3},
    ],
    ids=str,
)  # fmt: skip
def test_dry_finds_the_longest_repeats(options: dict[str, object]) -> None:
    """In a text as a whole, in one that grows and is asked after each token, and in one that is asked now and then."""
    params = SamplingParams(dry_multiplier=0.8, **options)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    found = 0
    for alphabet in (1, 2, 3, 5):
        ids: list[int] = rng.integers(0, alphabet, 60).tolist()
        grown, seldom = Repeats(params), Repeats(params)
        for length in range(60):
            want = longest_repeats(ids[:length], params)
            assert grown.longest() == want
            assert grown.longest() == want  # again
            assert Repeats(params, ids[:length]).longest() == want
            if rng.random() < 0.5:
                assert seldom.longest() == want
            grown.push(ids[length])
            seldom.push(ids[length])
            found += len(want)
    assert (found > 10) == (options != {"dry_penalty_last_n": 0})


def test_dry_follows_a_repeat_for_64_tokens() -> None:
    text = list(range(200))
    repeats = Repeats(SamplingParams(dry_multiplier=1.0), text)
    for n, token in enumerate(text[:100]):
        repeats.push(token)
        assert repeats.longest() == ({token + 1: min(n + 1, 64)} if n else {})
    assert Repeats(SamplingParams(dry_multiplier=1.0), text + text[:100]).longest() == {100: 64}


def test_dry_penalises_by_the_power_of_the_length() -> None:
    x = np.zeros(9, np.float32)
    params = SamplingParams(dry_multiplier=0.5, dry_base=2.0)
    ids = [1, 2, 3, 4, 1, 2, 3]
    penalise(x, params, None, None, Repeats(params, ids))
    np.testing.assert_allclose(x, [0, 0, 0, 0, -0.5 * 2.0 ** (3 - 2), 0, 0, 0, 0])
    x[:] = 0
    penalise(x, params, None, None, Repeats(params, [1] * 3000))
    assert np.isfinite(x).all()
    assert x[1] <= -1e8


def test_forbidden_words() -> None:
    params = SamplingParams(bad_token_ids=[4, [1, 2, 3], [9]])
    assert forbidden(params, [1, 2]) == [4, 3, 9]
    assert forbidden(params, [2]) == [4, 9]
    assert forbidden(params, [1, 2, 1]) == [4, 9]


def test_the_anti_model_of_fsd() -> None:
    """By hand, n = 3 and beta = 0.9: after "1 2" came 3 twice and 4 once, after "2" the same, and 3 is 2 of 8 tokens."""
    model = AntiLM(3, 0.9, [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2])
    ids = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    trigram, bigram, unigram = 2 / 4, 2 / 4, ids.count(3) / len(ids)
    assert model.probability(3) == pytest.approx(0.9 * trigram + 0.1 * 0.9 * bigram + 0.01 * unigram)
    assert model.probability(1) == pytest.approx(4 / 11)  # never after "2"
    assert model.probability(7) == 0
    assert AntiLM(3, 0.9, [1]).probability(1) == 0  # no context yet
    grown = AntiLM(3, 0.9)
    for token in ids:
        grown.push(token)
    assert [grown.probability(i) for i in range(5)] == [model.probability(i) for i in range(5)]
    assert AntiLM(1, 0.9, [5, 5, 6]).probability(5) == pytest.approx(2 / 3)
