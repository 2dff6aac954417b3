"""Whole rows of logits: the definition against plain NumPy, and the native kernels against the definition, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from inferflow.kernels import native
from inferflow.kernels.logits import FOLD, NativeRows, Rows, keys_of, logits_of, weight

from .native_ops import ISAS

Array = np.ndarray
VOCABS = [1, 2, 15, 16, 17, 255, 256, 257, 300, 1000, 1024, 5003, 49_152]
LOWEST = np.float32(-3.4e38)
TEMPERATURES = np.asarray([0.7, 1.0, 100.0, 1e-5, 2.5])


def logits(vocab: int) -> Array:
    """Noise, with ties, signed zeros, impossible tokens, and what float32 can hold."""
    x = (4 * np.random.default_rng(vocab).standard_normal((5, vocab))).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, 1::3] = -np.inf
    x[3, :: max(1, vocab // 7)] = 3e38
    x[3, 1::5] = -3e38
    x[4] = -0.0
    x[4, vocab // 2] = 0.0
    return x


def same(got: Array, expected: Array) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_definition(vocab: int) -> None:
    x = logits(vocab)
    rows = Rows(x)
    assert rows.columns % FOLD == 0
    padded = np.full((5, FOLD * rows.columns), -np.inf, np.float32)
    padded[:, :vocab] = x
    folded = padded.reshape(5, FOLD, -1)
    peaks, best, tokens = rows.peaks()
    np.testing.assert_array_equal(peaks, folded.max(axis=1))
    np.testing.assert_array_equal(best, x.max(axis=1))
    np.testing.assert_array_equal(tokens, x.argmax(axis=1))
    with np.errstate(under="ignore"):
        want = np.exp((folded - best[:, None, None].astype(np.float64)) / TEMPERATURES[:, None, None])
    np.testing.assert_allclose(rows.sums(best, TEMPERATURES), want.sum(axis=1), rtol=2e-5, atol=1e-35)
    floor = np.maximum(np.sort(x, axis=1)[:, -min(vocab, 9)], LOWEST)
    keys, counts = rows.reaching(peaks, floor)
    for row in range(5):
        ids = np.flatnonzero(x[row] >= floor[row])
        found = np.sort(keys[row, : counts[row]])
        np.testing.assert_array_equal(np.sort(found & np.uint64(0xFFFFFFFF)), ids)
        np.testing.assert_array_equal(logits_of(found), -np.sort(-x[row, ids]))
        same(found, np.sort(keys_of(x[row, ids], ids)))
    column = np.asarray([0, 1, 5]) % rows.columns
    np.testing.assert_array_equal(rows.cells(np.asarray([2, 2, 3]), column), folded[[2, 2, 3], :, column])


def test_weights_are_exponentials() -> None:
    x = np.linspace(-90, 0, 200_001).astype(np.float32)
    got, want = weight(x, np.float32(0), np.float64(1)), np.exp(x.astype(np.float64))
    there = x > -86
    np.testing.assert_allclose(got[there], want[there], rtol=5e-6)  # the exponent's rounding: up to 125 · 2^-24 · ln 2
    np.testing.assert_allclose(got[x > -1], want[x > -1], rtol=3e-7)
    assert (got[x < -87] == 0).all()
    assert got[-1] == 1
    assert weight(np.float32([-np.inf]), np.float32(3), np.float64(0.5))[0] == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("vocab", VOCABS)
def test_native_gives_the_same_bits(vocab: int, threads: int, isa: str) -> None:
    """Of rows that are all there, that are cut off from longer ones, and that are some of them in another order."""
    x = logits(vocab)
    wide = np.full((5, vocab + 3), 9e9, np.float32)
    wide[:, :vocab] = x
    pool, some = native.Pool(threads), np.asarray([3, 1, 1, 4])
    for source, at in ((x, None), (wide[:, :vocab], None), (x, some)):
        rows, fast = Rows(source, at), NativeRows(source, at, isa=isa, pool=pool)
        peaks, best, tokens = rows.peaks()
        found = fast.peaks()
        np.testing.assert_array_equal(found[0], peaks)  # zeros of either sign
        same(found[1], best)
        same(found[2], tokens)
        temperature = TEMPERATURES[: len(best)]
        same(fast.sums(best, temperature), rows.sums(best, temperature))
        for rank in {min(vocab, 3), min(vocab, 40), vocab}:
            floor = np.maximum(np.sort(x[rows.at], axis=1)[:, -rank], LOWEST)
            (keys, counts), (got, many) = rows.reaching(peaks, floor), fast.reaching(peaks, floor)
            same(many, counts)
            assert keys.shape == got.shape
            for row, count in enumerate(counts.tolist()):
                same(np.sort(got[row, :count]), np.sort(keys[row, :count]))


@pytest.mark.parametrize("isa", [None, *ISAS])
def test_a_row_that_holds_nan_is_told_and_harms_no_other(isa: str | None) -> None:
    x = logits(1000)
    clean = Rows(x).peaks()
    x[[0, 1], [999, 0]] = np.nan
    x[2] = np.nan
    peaks, best, tokens = (Rows(x) if isa is None else NativeRows(x, isa=isa)).peaks()
    assert np.isnan(best[:3]).all()
    for got, want in zip((peaks, best, tokens), clean, strict=True):
        np.testing.assert_array_equal(got[3:], want[3:])


@pytest.mark.parametrize("isa", [None, *ISAS])
def test_a_part_of_the_rows_has_the_bits_of_the_whole(isa: str | None) -> None:
    x = logits(5003)
    rows = Rows(x) if isa is None else NativeRows(x, isa=isa)
    best = rows.peaks()[1]
    sums = rows.sums(best, TEMPERATURES)
    for some in ([2], [4, 0], [3, 3, 3]):
        at = np.asarray(some)
        part = rows.of(at)
        assert type(part) is type(rows)
        same(part.peaks()[1], best[at])
        same(part.sums(best[at], TEMPERATURES[at]), sums[at])
