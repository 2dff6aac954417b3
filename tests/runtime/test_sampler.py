"""The sampler as a whole: statistics with fixed seeds, rows that do not see each other, states that can be made again, and
rows that fail alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from inferflow.errors import InferflowError, UnsupportedError
from inferflow.runtime.sampler import Sampled, SamplerState, SamplingParams, log_probabilities, sample

VOCAB = 300
LOGITS = (3 * np.random.default_rng(0).standard_normal((40, VOCAB))).astype(np.float32)
KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.2, "top_k": 20, "min_p": 0.05},
    {"temperature": 1.0, "typical_p": 0.8}, {"temperature": 1.0, "tfs_z": 0.9}, {"temperature": 1.0, "mirostat": 2},
    {"repetition_penalty": 1.3, "logprobs": 3}, {"temperature": 0.9, "frequency_penalty": 0.6, "presence_penalty": -0.5},
    {"dry_multiplier": 2.0}, {"logit_bias": {7: 100.0}, "logprobs": 0}, {"allowed_token_ids": [3, 5, 8], "temperature": 2.0},
    {"fsd_alpha": 0.6}, {"fsd_alpha": 0.6, "fsd_random": True, "temperature": 1.0, "top_p": 0.93, "top_k": 8},
    {"temperature": 1.5, "bad_token_ids": [[1, 2], 9], "min_tokens": 4, "stop_token_ids": [11]},
]  # fmt: skip


def state(index: int = 0, seed: int = 5, **options: Any) -> SamplerState:
    return SamplerState(SamplingParams(**options), [1, 2, 3, 1, 2], seed, index, ends=[0])


def one(logits: np.ndarray, of: SamplerState) -> Sampled:
    sampled = sample(logits[None], [of])[0]
    assert isinstance(sampled, Sampled)
    return sampled


def run(of: SamplerState, steps: int) -> list[Sampled]:
    out = []
    for step in range(steps):
        out.append(one(LOGITS[step], of))
        of.push(out[-1])
    return out


def test_greedy_is_the_greatest_logit() -> None:
    assert [s.token for s in run(state(), 20)] == LOGITS[:20].argmax(axis=1).tolist()
    assert [s.token for s in run(state(temperature=1e-7, top_p=0.5), 20)] == LOGITS[:20].argmax(axis=1).tolist()
    assert one(LOGITS[0], state(temperature=5.0, top_k=1)).token == LOGITS[0].argmax()


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"typical_p": 0.8}], ids=str)
def test_draws_have_the_probabilities_they_should(options: dict[str, Any]) -> None:
    logits = np.log(np.float32([0.45, 0.25, 0.15, 0.1, 0.05]))
    kept = 3 if options.get("top_p") else 5
    params = SamplingParams(temperature=1.0, **options)
    seeds = [SamplerState(params, [1], seed) for seed in range(4000)]
    tokens = [s.token for s in sample(np.repeat(logits[None], len(seeds), axis=0), seeds) if isinstance(s, Sampled)]
    share = np.bincount(tokens, minlength=5) / len(seeds)
    want = np.exp(logits[:kept]) / np.exp(logits[:kept]).sum()
    if not options.get("typical_p"):
        # Pearson's statistic; 4 degrees of freedom: above 18.5 once in a thousand seeds
        assert (len(seeds) * (share[:kept] - want) ** 2 / want).sum() < 18.5
    assert share[kept:].sum() == 0


def test_random_numbers_are_uniform_and_of_their_counter() -> None:
    """The Kolmogorov-Smirnov distance over seeds, indices and positions; no two the same."""
    for numbers in (
        [state(seed=seed).uniform() for seed in range(3000)],
        [state(index=index).uniform() for index in range(3000)],
        [SamplerState(SamplingParams(), [0] * n, 0).uniform() for n in range(1000)],
    ):
        steps = np.arange(len(numbers)) / len(numbers)
        assert np.abs(np.sort(numbers) - steps).max() < 1.63 / np.sqrt(len(numbers))  # 1 in 100
        assert len(set(numbers)) == len(numbers)
    assert state(seed=(1 << 64) - 1).uniform() != state(seed=(1 << 64) - 1, index=1).uniform()


@pytest.mark.parametrize("seed", range(3))
def test_no_row_sees_another(seed: int) -> None:
    """Tokens, log-probabilities and surprises, to the last bit, alone and in batches whose members come and go."""
    alone = [run(state(n, seed, **options), 12) for n, options in enumerate(KINDS)]
    rng = np.random.default_rng(seed)
    states = [state(n, seed, **options) for n, options in enumerate(KINDS)]
    done = [0] * len(states)
    while any(n < 12 for n in done):
        going = [i for i in rng.permutation(len(states)).tolist() if done[i] < 12 and rng.random() < 0.7]
        logits = np.stack([LOGITS[done[i]] for i in going]) if going else np.zeros((0, VOCAB), np.float32)
        before = logits.copy()
        for i, sampled in zip(going, sample(logits, [states[i] for i in going]), strict=True):
            assert sampled == alone[i][done[i]], KINDS[i]
            states[i].push(sampled)
            done[i] += 1
        np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_state_can_be_made_again(options: dict[str, Any]) -> None:
    whole = state(2, **options)
    sampled = run(whole, 16)
    first = state(2, **options)
    run(first, 9)
    again = SamplerState(
        first.params, [1, 2, 3, 1, 2], 5, 2, generated=[s.token for s in sampled[:9]], ends=[0], mu=first.mu
    )
    for step in range(9, 16):
        assert one(LOGITS[step], again) == sampled[step]
        again.push(sampled[step])
    assert list(again.ids) == list(whole.ids)


def test_logprobs_are_the_models_own() -> None:
    want = LOGITS[0] - np.log(np.exp(LOGITS[0].astype(np.float64)).sum())
    for options in ({}, {"temperature": 0.3, "top_k": 1}, {"repetition_penalty": 2.0}):
        sampled = one(LOGITS[0], state(logprobs=5, **options))
        assert sampled.logprob == pytest.approx(want[sampled.token], abs=1e-6)
        assert [i for i, _ in sampled.top] == np.argsort(-LOGITS[0], kind="stable")[:5].tolist()
        np.testing.assert_allclose([p for _, p in sampled.top], np.sort(want)[::-1][:5], atol=1e-6)
    assert one(LOGITS[0], state()).logprob is None
    assert one(LOGITS[0], state(logprobs=0)).top == ()
    prompt = log_probabilities(LOGITS[:3], [4, 5, 6], [2, 0, 2])
    assert [len(top) for _, top in prompt] == [2, 0, 2]
    assert prompt[0][0] == pytest.approx(want[4], abs=1e-6)
    assert log_probabilities(LOGITS[:0], [], []) == []
    assert len(log_probabilities(LOGITS[:1], [0], [1000])[0][1]) == VOCAB


def test_a_bad_row_fails_alone() -> None:
    logits = LOGITS[:6].copy()
    logits[1, 7] = np.nan
    logits[3] = np.nan
    logits[4, 9] = np.inf
    states = [state(i, **(KINDS[i] if i != 5 else {"logit_bias": {3: 1.0}, "logprobs": 2})) for i in range(6)]
    got = sample(logits, states)
    assert [isinstance(s, InferflowError) for s in got] == [False, True, False, True, True, False]
    assert "no finite logits" in str(got[1])
    for i in (0, 2, 5):
        assert got[i] == sample(logits[i : i + 1], states[i : i + 1])[0]


def test_nothing_left_to_choose_is_said() -> None:
    got = sample(LOGITS[:2], [state(allowed_token_ids=[3], bad_token_ids=[3], temperature=1.0), state()])
    assert "no token is allowed" in str(got[0])
    assert isinstance(got[1], Sampled)


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-10, 1e-5, 1e-4, 2.0, 100.0])
@pytest.mark.parametrize(
    "options", [{}, {"top_p": 1e-6}, {"min_p": 0.5}, {"top_k": 3, "typical_p": 0.5}, {"tfs_z": 0.5}], ids=str
)
def test_extreme_temperatures_and_logits(temperature: float, options: dict[str, Any]) -> None:
    extremes = np.float32([[11, 65504, -65504, 3e38, -3e38, 0], [-np.inf, 1e-38, 0, -np.inf, 0, 0], [-1e30] * 6])
    states = [state(i, temperature=temperature, logprobs=3, **options) for i in range(3)]
    for row, sampled in enumerate(sample(extremes, states)):
        assert isinstance(sampled, Sampled)
        assert extremes[row, sampled.token] > -np.inf
        assert sampled.logprob is not None
        assert np.isfinite(sampled.logprob)
        assert not any(np.isnan(p) for _, p in sampled.top)


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [0, 11]] = 50, 40
    s = state(min_tokens=3, stop_token_ids=[11], temperature=1.0)
    for _ in range(3):
        sampled = one(logits[0], s)
        assert sampled.token not in (0, 11)
        s.push(sampled)
    assert one(logits[0], s).token == 0


def test_only_allowed_and_never_forbidden_tokens() -> None:
    options = {"allowed_token_ids": [3, 5, 8], "bad_token_ids": [5, [3, 8]], "temperature": 100.0}
    texts = [[sampled.token for sampled in run(state(index, **options), 5)] for index in range(8)]
    assert {token for text in texts for token in text} == {3, 8}
    assert not any((3, 8) in pairwise(text) for text in texts)


def test_biasing_works_for_any_token() -> None:
    assert one(LOGITS[0], state(logit_bias={0: 100.0})).token == 0
    best = int(LOGITS[0].argmax())
    assert one(LOGITS[0], state(logit_bias={best: -100.0})).token == np.argsort(-LOGITS[0])[1]


def test_mirostat_steers_to_its_target() -> None:
    """Algorithm 2 of the paper on one long text: the mean surprise comes to tau, and mu is what the update makes of it."""
    rng = np.random.default_rng(1)
    s = state(temperature=1.0, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.1)
    assert s.mu == 6.0
    surprises = []
    for _ in range(1500):
        logits = (2 * rng.standard_normal(VOCAB)).astype(np.float32)
        p = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
        kept = np.flatnonzero((-np.log2(p) <= s.mu) | (p == p.max()))
        sampled = one(logits, s)
        assert sampled.token in kept
        assert sampled.surprise == pytest.approx(-np.log2(p[sampled.token] / p[kept].sum()), abs=1e-4)
        mu = s.mu
        s.push(sampled)
        assert s.mu == pytest.approx(mu - 0.1 * (sampled.surprise - 3.0))
        surprises.append(sampled.surprise)
    assert np.mean(surprises[200:]) == pytest.approx(3.0, abs=0.1)


def test_fsd_penalises_what_would_repeat() -> None:
    """Of the k likeliest, the greatest (1 - alpha) p - alpha q, by hand: after "1 2" came 3, so 3 gives way to 4."""
    logits = np.full(VOCAB, -20, np.float32)
    logits[[3, 4, 5]] = np.log([0.5, 0.3, 0.2])
    assert one(logits, state(fsd_alpha=0.5)).token == 4
    assert one(logits, state(fsd_alpha=0.5, fsd_k=1)).token == 3
    assert one(logits, state(fsd_alpha=0.01)).token == 3
    fixed = {"fsd_alpha": 0.5, "temperature": 1.0}
    assert {one(logits, state(seed=seed, **fixed)).token for seed in range(30)} == {4}
    random = [one(logits, state(seed=seed, fsd_random=True, **fixed)).token for seed in range(300)]
    counts = np.bincount(random, minlength=6)
    np.testing.assert_allclose(counts[3:] / 300, [0.25, 0.65, 0.1], atol=0.08)
    late = SamplerState(SamplingParams(fsd_random=True, **fixed), [1, 2, 3, 1, 2], 0, generated=[9] * 12 + [1, 2])  # type: ignore[arg-type]
    assert one(logits, late).token == 4


def test_a_structure_needs_somebody_to_keep_it() -> None:
    with pytest.raises(UnsupportedError, match="regex"):
        state(regex="a+")
