"""Truncation against the definitions of the papers, written plainly; and that no row sees another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from inferflow.runtime.filters import FOLD, choose, draw, fold, head, largest
from inferflow.runtime.sampling_params import SamplingParams

Array = np.ndarray


def softmax(x: Array, temperature: float = 1.0) -> Array:
    z = (x.astype(np.float64) - x.max()) / temperature
    return np.exp(z) / np.exp(z).sum()


def top_k(p: Array, k: int) -> Array:
    return np.isin(np.arange(len(p)), np.argsort(-p, kind="stable")[:k]) * p


def nucleus(p: Array, share: float) -> Array:
    """The smallest set of the likeliest tokens that holds `share` (Holtzman et al. 2020, arXiv:1904.09751)."""
    out, whole, got = np.zeros_like(p), p.sum(), 0.0
    for token in np.argsort(-p, kind="stable"):
        if got >= share * whole:
            break
        out[token] = p[token]
        got += p[token]
    return out


def min_p(p: Array, share: float) -> Array:
    """At least `share` of the likeliest token's probability (Nguyen et al. 2024, arXiv:2407.01082)."""
    return np.where(p >= share * p.max(), p, 0)


def typical(p: Array, share: float) -> Array:
    """The smallest set of tokens closest to the entropy that holds `share` (Meister et al. 2022, eq. 7)."""
    q = p / p.sum()
    there = np.flatnonzero(q)
    entropy = -sum(q[i] * np.log(q[i]) for i in there)
    out, got = np.zeros_like(p), 0.0
    for token in sorted(there, key=lambda i: (abs(-np.log(q[i]) - entropy), -q[i])):
        if got >= share:
            break
        out[token] = p[token]
        got += q[token]
    return out


def tail_free(p: Array, z: float) -> Array:
    """Tokens in order, until the absolute second differences of the sorted distribution sum to more than `z`."""
    order = [i for i in np.argsort(-p, kind="stable") if p[i] > 0]
    q = [p[i] / p.sum() for i in order]
    bends = [abs((q[i] - q[i + 1]) - (q[i + 1] - q[i + 2])) for i in range(len(q) - 2)]
    if sum(bends) < 1e-6:  # a straight line: as if it bent the same everywhere
        bends = [1.0] * len(bends)
    keep, got = len(q), 0.0
    for i, bend in enumerate(bends):
        got += bend / sum(bends)
        if got > z:
            keep = max(1, i)
            break
    return np.isin(np.arange(len(p)), order[:keep]) * p


def wanted(x: Array, p: SamplingParams) -> Array:
    """The distribution that the filters leave, in the documented order."""
    q = softmax(x, p.temperature)
    if p.top_k > 0:
        q = top_k(q, p.top_k)
    if p.tfs_z < 1:
        q = tail_free(q, p.tfs_z)
    if p.typical_p < 1:
        q = typical(q, p.typical_p)
    if p.top_p < 1:
        q = nucleus(q, p.top_p)
    if p.min_p > 0:
        q = min_p(q, p.min_p)
    return q / q.sum()


def got(x: Array, p: SamplingParams, points: int = 500) -> Array:
    """The distribution of what `choose` takes, read off at equally spaced points of [0, 1)."""
    many = fold(np.repeat(x[None], points, axis=0))
    tokens, _ = choose(many, [p] * points, np.full(points, np.inf), (np.arange(points) + 0.5) / points)
    return np.bincount(tokens, minlength=len(x)) / points


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 7}, {"top_k": 10_000}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 1e-6}, {"top_p": 0.999},
    {"min_p": 0.1}, {"min_p": 0.99}, {"typical_p": 0.3}, {"typical_p": 0.9}, {"tfs_z": 0.3}, {"tfs_z": 0.95},
    {"top_k": 20, "top_p": 0.8}, {"top_k": 20, "typical_p": 0.5}, {"top_k": 30, "tfs_z": 0.9, "top_p": 0.9, "min_p": 0.2},
    {"typical_p": 0.7, "top_p": 0.8}, {"typical_p": 0.5, "min_p": 0.5}, {"top_p": 0.9, "min_p": 0.05},
    {"tfs_z": 0.8, "typical_p": 0.9},
]  # fmt: skip


def rows() -> Iterator[Array]:
    rng = np.random.default_rng(3)
    yield rng.standard_normal(53).astype(np.float32)
    yield (3 * rng.standard_normal(400)).astype(np.float32)
    yield (8 * rng.standard_normal(67)).astype(np.float32)
    yield np.zeros(40, np.float32)
    yield np.float32([0.0, 1000.0, -1000.0, 999.0, -np.inf, 5.0])


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_what_is_left_is_what_the_definition_leaves(options: dict[str, Any], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **options)
    for x in rows():
        want, have = wanted(x, params), got(x, params)
        np.testing.assert_allclose(have, want, atol=1 / 500 + 1e-9)
        assert set(np.flatnonzero(have)) <= set(np.flatnonzero(want))


def test_a_wide_nucleus_over_a_large_vocabulary() -> None:
    """More tokens than the first look finds."""
    x = np.random.default_rng(0).standard_normal(30_000).astype(np.float32)
    params = SamplingParams(temperature=1, top_p=0.9)
    want = wanted(x, params)
    points = (np.arange(100) + 0.5) / 100
    tokens, surprise = choose(fold(np.repeat(x[None], 100, axis=0)), [params] * 100, np.full(100, np.inf), points)
    order = np.argsort(-want, kind="stable")
    expected = order[np.searchsorted(np.cumsum(want[order]), points)]
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(surprise, -np.log2(want[tokens]), rtol=1e-5)


def test_draws_follow_the_distribution() -> None:
    for x in rows():
        points = (np.arange(20_000) + 0.5) / 20_000
        scores = fold(np.repeat(x[None], len(points), axis=0))
        share = np.bincount(draw(scores, np.full(len(points), 0.8), points), minlength=len(x)) / len(points)
        np.testing.assert_allclose(share, softmax(x, 0.8), atol=1e-4)


@pytest.mark.parametrize("vocab", [1, 2, FOLD - 1, FOLD, FOLD + 1, 1000])
def test_ends_of_the_line(vocab: int) -> None:
    """The least and the greatest random number give tokens of the vocabulary, with a probability above 0."""
    x = np.random.default_rng(vocab).standard_normal((2, vocab)).astype(np.float32)
    x[:, vocab // 2 :: 3] = -np.inf
    x[:, 0] = 1
    for u in (0.0, 1 - 2.0**-53):
        tokens = draw(fold(x), np.ones(2), np.full(2, u))
        assert np.isfinite(x[[0, 1], tokens]).all()


def test_heads_are_sorted_and_break_ties_by_id() -> None:
    x = np.random.default_rng(1).integers(-4, 5, (5, 333)).astype(np.float32)
    scores = fold(x)
    found = largest(scores, np.asarray([1, 5, 40, 333, 400]))
    for row, count in enumerate([1, 5, 40, 333, 333]):
        order = np.argsort(-x[row], kind="stable")[:count]
        np.testing.assert_array_equal(found.ids[row, :count], order)
        np.testing.assert_array_equal(found.logits[row, :count], x[row, order])
    cut = head(scores, scores.best - 2.5)
    assert (
        np.isfinite(cut.logits).sum(axis=1).tolist() == (x >= x.max(axis=1, keepdims=True) - 2.5).sum(axis=1).tolist()
    )


def test_no_row_sees_another() -> None:
    """To the last bit, whatever its company needs in room."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((12, 5000)) * rng.uniform(0.1, 6, (12, 1))).astype(np.float32)
    options: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}, {"top_p": 0.999}, {"top_k": 3}, {}]
    params = [SamplingParams(temperature=0.6 + 0.1 * i, **options[i % 6]) for i in range(12)]
    temperature, mu = np.asarray([p.temperature for p in params]), np.full(12, np.inf)
    mu[5] = 3.0
    for u in rng.random((20, 12)):
        together = choose(fold(x), params, mu, u)
        for row in range(12):
            one = slice(row, row + 1)
            alone = choose(fold(x[one]), params[one], mu[one], u[one])
            assert (together[0][row], together[1][row]) == (alone[0][0], alone[1][0])
        drawn = draw(fold(x), temperature, u)
        for row in range(12):
            one = slice(row, row + 1)
            assert drawn[row] == draw(fold(x[one]), temperature[one], u[one])[0]
