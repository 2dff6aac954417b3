"""The codebooks are what their maker says, and near the best it can find."""

from __future__ import annotations

import numpy as np
import pytest

from quant.codebooks import CODEBOOKS, DEVIATIONS
from quant.make_codebooks import density, error, improve, make


@pytest.mark.parametrize(("name", "bound"), [("q3", -15.16), ("q3.5", -18.06), ("q4", -20.95)])
def test_error_on_gaussians(name: str, bound: float) -> None:
    points, mass = density(250)
    scale = DEVIATIONS[name]
    assert 10 * np.log10(error(points * scale, mass, CODEBOOKS[name].T.astype(float)) / scale**2) < bound


@pytest.mark.parametrize("name", CODEBOOKS)
def test_no_point_can_be_moved_for_the_better(name: str) -> None:
    points, mass = density(250)
    points = points * DEVIATIONS[name]
    table = CODEBOOKS[name].T.astype(float)
    before = error(points, mass, table)
    assert error(points, mass, improve(points, mass, table)) > before * 0.997


def test_the_maker_makes_one() -> None:
    exact, rounded, _, table = make(4, starts=3, kept=1)
    assert table.shape == (4, 2)
    assert table.max() <= 63
    assert -10 < exact < -9.25  # two bits a weight: Lloyd and Max have -9.30 dB
    assert rounded == pytest.approx(exact, abs=0.05)
