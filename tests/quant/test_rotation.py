"""The Hadamard rotation: its matrix, its order of operations, its refusals."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quant import hadamard, native, widest_rotation

WIDTHS = [2, 4, 64, 128, 1024]


def matrix(width: int) -> NDArray[np.float64]:
    """Sylvester's, normed."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    return np.array(signs) / np.sqrt(width)


@pytest.mark.parametrize("width", WIDTHS[:4])
def test_it_is_the_matrix_in_natural_order(width: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 256)).astype(np.float32)
    expected = (x.astype(np.float64).reshape(3, 2, -1, width) @ matrix(width)).reshape(x.shape)
    assert np.abs(hadamard(x, width) - expected).max() < 2e-6


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_its_own_inverse_and_keeps_lengths(width: int) -> None:
    x = np.random.default_rng(1).standard_normal((5, 1024)).astype(np.float32)
    y = hadamard(x, width)
    assert np.abs(hadamard(y, width) - x).max() < 1e-5
    assert np.allclose((y**2).sum(1), (x**2).sum(1), rtol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_order_of_operations(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of width 1, 2, 4, …, then one product, all in float32: bit for bit, with and without the compiled helper."""
    x = (np.random.default_rng(2).standard_normal((2, 1024)) * 3).astype(np.float32)
    expected = x.copy()
    for row in expected:
        half = 1
        while half < width:
            for i in range(1024):
                if not i & half:
                    row[i], row[i + half] = row[i] + row[i + half], row[i] - row[i + half]
            half *= 2
        row *= np.float32(1 / np.sqrt(width))
    assert (hadamard(x, width) == expected).all()
    monkeypatch.setattr(native, "_library", lambda: None)
    assert (hadamard(x, width) == expected).all()


def test_no_rotation_is_a_copy() -> None:
    x = np.ones((2, 6), np.float32)
    y = hadamard(x, 0)
    assert (y == x).all()
    assert not np.shares_memory(x, y)


@pytest.mark.parametrize("width", [-2, 1, 3, 12, 128])
def test_impossible_widths_are_refused(width: int) -> None:
    with pytest.raises(
        ValueError, match=f"a rotation of {width} columns is impossible: a power of two that divides 192"
    ):
        hadamard(np.zeros((2, 192), np.float32), width)


def test_widest_rotation() -> None:
    assert [widest_rotation(cols) for cols in (576, 896, 1536, 8192, 7, 6)] == [64, 128, 512, 4096, 0, 2]
    assert widest_rotation(1536, most=128) == 128
