"""Quantisers: how large their errors are, on what numbers, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quant import Packed, calibrate, dequantise, native, quantise, unpack
from quant.codebooks import CODEBOOKS
from quant.formats import find_format
from quant.solve import encode, find_scales

Floats = NDArray[np.float32]

# Mean squared error on Gaussians, in dB, not to be exceeded. A scale of its own for each 64 gains 0.7 to 1 dB.
BOUNDS = {"q3": -15.7, "q3.5": -18.7, "q4": -21.8, "q8": -44.0}
PAIRS = ["q3", "q3.5", "q4"]


def gaussian(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def decibels(w: Floats, packed: Packed) -> float:
    error = dequantise(packed).astype(np.float64) - w
    return float(10 * np.log10((error**2).mean() / (w.astype(np.float64) ** 2).mean() + 1e-30))


def hessian_of(cols: int, seed: int = 3) -> NDArray[np.float64]:
    """Of correlated inputs of unequal size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((600, cols)) @ (np.eye(cols) + 0.15 * rng.standard_normal((cols, cols)))
    x *= np.exp(0.7 * rng.standard_normal(cols))
    return x.T @ x / len(x)


def weighted(w: Floats, packed: Packed, hessian: NDArray[np.float64]) -> float:
    error = dequantise(packed) - w
    return float(np.einsum("ij,jk,ik->", error, hessian, error))


@pytest.mark.parametrize("rotation", [0, 64])
@pytest.mark.parametrize("name", BOUNDS)
def test_error_on_gaussians(name: str, rotation: int) -> None:
    w = gaussian(64, 512)
    assert decibels(w, quantise(w, name, rotation=rotation)) < BOUNDS[name]


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("cols", [1, 37, 66, 100, 191])
def test_tails_are_as_good_as_the_rest(name: str, cols: int) -> None:
    w = gaussian(45, cols)
    packed = quantise(w, name)
    assert dequantise(packed).shape == w.shape
    assert decibels(w, packed) < BOUNDS[name] + 0.2
    tail = w[:, cols // 64 * 64 :]
    error = (dequantise(packed) - w)[:, cols // 64 * 64 :]
    assert (error**2).mean() < 10 ** (BOUNDS[name] / 10 + 0.05) * (tail**2).mean()


@pytest.mark.parametrize("name", BOUNDS)
def test_rotation_may_reach_into_the_padding(name: str) -> None:
    w = gaussian(20, 100)
    assert decibels(w, quantise(w, name, rotation=128)) < BOUNDS[name] + 1.2


@pytest.mark.parametrize("name", BOUNDS)
def test_rotation_helps_outliers(name: str) -> None:
    w = gaussian(32, 512)
    w[:, ::50] *= 12
    assert decibels(w, quantise(w, name, rotation=512)) < decibels(w, quantise(w, name)) - 1


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("power", [-120, -60, 60, 110])
def test_huge_and_tiny_weights(name: str, power: int) -> None:
    """Scaling rows by powers of two changes their scales and nothing else."""
    w = gaussian(32, 128)
    plain, scaled = quantise(w, name, rotation=64), quantise(np.ldexp(w, power), name, rotation=64)
    assert (plain.codes == scaled.codes).all()
    assert (plain.scales == scaled.scales).all()
    assert (np.ldexp(plain.row_scales, power) == scaled.row_scales).all()


@pytest.mark.parametrize("name", BOUNDS)
def test_rows_and_groups_of_zeros_stay_zero(name: str) -> None:
    w = gaussian(20, 192)
    w[3] = 0
    w[:, 64:128] = 0
    back = dequantise(quantise(w, name))
    assert (back[3] == 0).all()
    assert (back[:, 64:128] == 0).all()
    assert not dequantise(quantise(np.zeros((3, 5), np.float32), name)).any()


@pytest.mark.parametrize("name", BOUNDS)
def test_groups_of_very_unequal_size(name: str) -> None:
    w = gaussian(32, 256)
    w[:, 64:] /= 20
    error = dequantise(quantise(w, name)) - w
    for group in range(4):
        part = slice(64 * group, 64 * group + 64)
        bound = -16 if name == "q8" else BOUNDS[name] + 0.3  # int8 steps of a small group are large: no less is clipped
        assert 10 * np.log10((error[:, part] ** 2).mean() / (w[:, part] ** 2).mean()) < bound


@pytest.mark.parametrize("name", BOUNDS)
def test_one_outlier_is_not_clipped_away(name: str) -> None:
    """The scale of the group's power would clip it to 10."""
    w = gaussian(16, 64)
    w[:, 7] = 30
    assert np.abs(dequantise(quantise(w, name))[:, 7] - 30).max() < 9


def test_stacks() -> None:
    """Stacked matrices are each what they are alone, and progress is told."""
    w = gaussian(2, 3, 20, 70)
    told: list[tuple[int, int]] = []
    packed = quantise(w, "q4", progress=lambda done, total: told.append((done, total)))
    assert packed.codes.shape == (2, 3, 2, 2, 512)
    assert told == [(n, 6) for n in range(1, 7)]
    alone = quantise(w[1, 2], "q4")
    assert (packed.codes[1, 2] == alone.codes).all()
    assert (dequantise(packed)[1, 2] == dequantise(alone)).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types(dtype: type) -> None:
    w = gaussian(16, 64).astype(dtype)
    assert (quantise(w, "q4").codes == quantise(w.astype(np.float32), "q4").codes).all()


@pytest.mark.parametrize("name", PAIRS)
def test_importance_and_hessian_lessen_the_weighted_error(name: str) -> None:
    w, hessian = gaussian(48, 256), hessian_of(256)
    plain = weighted(w, quantise(w, name), hessian)
    important = weighted(w, quantise(w, name, importance=np.diag(hessian)), hessian)
    feedback = weighted(w, quantise(w, name, hessian=hessian), hessian)
    assert important < 0.95 * plain
    assert feedback < 0.75 * important


@pytest.mark.parametrize("name", PAIRS)
def test_a_hessian_without_correlation_is_an_importance(name: str) -> None:
    w, importance = gaussian(16, 128), np.linspace(0.5, 2, 128)
    by_hessian = quantise(w, name, hessian=np.diag(importance))
    by_importance = quantise(w, name, importance=importance)
    hessian = np.diag(importance)
    assert weighted(w, by_hessian, hessian) == pytest.approx(weighted(w, by_importance, hessian), rel=0.02)


def test_hessian_of_a_padded_matrix() -> None:
    w, hessian = gaussian(16, 100), hessian_of(100)
    feedback = quantise(w, "q3.5", hessian=hessian)
    assert weighted(w, feedback, hessian) < 0.8 * weighted(w, quantise(w, "q3.5"), hessian)


def test_hessian_of_too_few_inputs() -> None:
    """Rank 5 of 128: damping makes it definite."""
    x = np.random.default_rng(0).standard_normal((5, 128))
    w, hessian = gaussian(16, 128), x.T @ x / 5
    feedback = weighted(w, quantise(w, "q3", hessian=hessian), hessian)
    assert feedback < 0.3 * weighted(w, quantise(w, "q3"), hessian)


@pytest.mark.parametrize("name", PAIRS)
def test_compiled_and_numpy_agree_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.available(), "quant/_search is not built: python setup.py build_ext --inplace"
    form = find_format(name)
    w = gaussian(32, 128)
    w[3], w[2, 5] = 0, 40
    w[:, 64:] *= 0.1
    diagonal = np.abs(gaussian(128, seed=4))
    diagonal[100:] = 0
    full = np.triu(0.3 * gaussian(64, 64, seed=5) + 3 * np.eye(64, dtype=np.float32))
    grid = np.abs(w).max(1) / np.float32(6300)

    def results() -> list[NDArray[np.generic]]:
        scales = find_scales(w, diagonal, form)
        group = np.ascontiguousarray(w[:, :64])
        steps = find_scales(group, full, form, grid)
        return [scales, steps, *encode(w, diagonal, scales, form), *encode(group, full, steps, form)]

    compiled = results()
    monkeypatch.setattr(native, "_library", lambda: None)
    for one, other in zip(compiled, results(), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("size", [1, 64, 130])
def test_cholesky(size: int) -> None:
    x = gaussian(2 * size, size)
    a = x.T @ x / size
    factor = a.copy()
    calibrate._cholesky(factor, block=50)
    assert np.abs(factor - np.linalg.cholesky(a)).max() < 1e-5
    with pytest.raises(np.linalg.LinAlgError):
        calibrate._cholesky(a - 5 * np.eye(size, dtype=np.float32), block=50)


@pytest.mark.parametrize("depth", [0, 1, 64, 1100])
def test_products(depth: int) -> None:
    """Of the first columns of a matrix, in float32."""
    a, b = gaussian(48, depth + 3), gaussian(depth, 64, seed=1)
    expected = a[:, :depth].astype(np.float64) @ b
    assert np.abs(native.product(a, b) - expected).max() <= 5e-4
    assert native.product(a, b).dtype == np.float32


@pytest.mark.parametrize("name", PAIRS)
def test_codes_are_the_nearest_points(name: str) -> None:
    """Against a search through all signed points."""
    form = find_format(name)
    w = gaussian(16, 64)
    packed = quantise(w, name)
    table = unpack(packed).astype(np.float32)
    scales = (packed.scales[0, 0].astype(np.float32) * packed.row_scales)[:, None]
    x, y = CODEBOOKS[form.name].astype(np.float32)
    signed = np.concatenate([np.stack([sx * x, sy * y]) for sx in (1, -1) for sy in (1, -1)], 1)
    columns = np.arange(64).reshape(-1, 2, 4)
    for first, second in zip(columns[:, 0].ravel(), columns[:, 1].ravel(), strict=True):
        distance = (w[:, first, None] - scales * signed[0]) ** 2 + (w[:, second, None] - scales * signed[1]) ** 2
        chosen = (w[:, first] - scales[:, 0] * table[:, first]) ** 2 + (
            w[:, second] - scales[:, 0] * table[:, second]
        ) ** 2
        assert np.allclose(chosen, distance.min(1), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", BOUNDS)
def test_weights_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    w = gaussian(4, 8)
    w[1, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantise(w, name)


def test_refusals() -> None:
    w = gaussian(4, 100)
    with pytest.raises(ValueError, match="f16 is no packed format"):
        quantise(w, "f16")
    with pytest.raises(ValueError, match="a matrix of rows and columns is wanted"):
        quantise(w[0], "q4")
    with pytest.raises(ValueError, match="a rotation of 48 columns is impossible"):
        quantise(w, "q4", rotation=48)
    with pytest.raises(ValueError, match=r"the importance of the matrix must be of shape \(100,\), not \(99,\)"):
        quantise(w, "q4", importance=np.ones(99))
    with pytest.raises(ValueError, match=r"must be of shape \(128,\), not \(100,\)"):
        quantise(w, "q4", rotation=64, importance=np.ones(100))
    with pytest.raises(ValueError, match="the Hessian must be finite"):
        quantise(w, "q4", hessian=np.full((100, 100), np.nan))
    with pytest.raises(ValueError, match="the importance must be finite and not negative, with a positive mean"):
        quantise(w, "q4", importance=np.zeros(100))
    with pytest.raises(ValueError, match="the Hessian is not positive semidefinite"):
        quantise(w, "q4", hessian=np.eye(100) - 50 * np.eye(100)[::-1])
