"""Rotary frequencies against transformers: to the last bit, and cos and sin far out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferflow.errors import SpecError
from inferflow.kernels.reference import rotate
from inferflow.kernels.rope import frequencies, rope_length

from . import rope_oracle as oracle
from .rope_oracle import CASES, POSITIONS, SIZES, Case, key, scaling_of


def node(case: Case, dim: int, theta: float) -> dict[str, Any]:
    """Parameters of a `rope` node."""
    return {
        "dim": dim, "theta": theta, "pairing": "half", "kind": case.kind, "scaling": scaling_of(case, dim),
        "max_positions": case.limit, "original": None, "truncate": True,
    }  # fmt: skip


def table(inverse: np.ndarray, factor: float) -> np.ndarray:
    """cos and sin at POSITIONS: what `rotate` makes of (1, 0)."""
    n = len(inverse)
    x = np.zeros((len(POSITIONS), 2 * n), np.float32)
    x[:, :n] = 1
    y = rotate(x, np.asarray(POSITIONS), inverse, factor, "half")
    return np.stack([y[:, :n], y[:, n:]])


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answers of transformers where torch computes without vector instructions."""
    path = tmp_path_factory.mktemp("rope") / "oracle.npz"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    subprocess.run(
        [sys.executable, str(Path(oracle.__file__)), str(path)], check=True, env=environment, capture_output=True
    )
    return np.load(path)


@pytest.mark.parametrize(("dim", "theta"), SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_transformers(case: Case, dim: int, theta: float, exact: Any) -> None:
    name = key(case, dim, theta)
    inverse, factor = frequencies(node(case, dim, theta), case.length)
    np.testing.assert_array_equal(inverse, exact[f"{name}.inverse"])
    assert factor == exact[f"{name}.factor"]
    assert np.abs(table(inverse, factor) - exact[f"{name}.table"]).max() <= 1e-6


@pytest.mark.parametrize(("dim", "theta"), SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_vectorised_torch(case: Case, dim: int, theta: float) -> None:
    """Torch's vector powers are within one unit of the true ones; what follows may double that."""
    inverse, factor = frequencies(node(case, dim, theta), case.length)
    want, want_factor, _ = oracle.theirs(case, dim, theta)
    assert factor == want_factor
    np.testing.assert_allclose(inverse, want, rtol=4 * 2.0**-24, atol=0)


def test_length_decides_only_where_it_should() -> None:
    for case in CASES:
        parameters = node(case, 64, 1e4)
        keys = {rope_length(parameters, n) for n in (1, 4096, 4097, 9000)}
        assert len(keys) == {"longrope": 2, "dynamic": 3}.get(case.kind, 1)


@pytest.mark.parametrize(
    ("kind", "scaling", "change", "words"),
    [
        ("linear", {"factor": 0.0}, {}, "factor"),
        ("linear", {"factor": "8"}, {}, "factor"),
        ("linear", {"factor": float("inf")}, {}, "factor"),
        ("dynamic", {"factor": 2.0}, {"max_positions": None}, "max_positions"),
        ("dynamic", {"factor": 2.0}, {"dim": 2}, "more than 2"),
        ("dynamic", {"factor": 1e14}, {"dim": 4, "max_positions": 1}, "base"),
        ("ntk_alpha", {"alpha": 1e14}, {"dim": 4}, "base"),
        ("ntk_alpha", {"alpha": 1e300}, {}, "alpha"),
        ("default", {}, {"theta": -1.0}, "theta"),
        ("default", {}, {"theta": 1e300}, "theta"),
        ("yarn", {"factor": 4.0, "beta_fast": -3}, {}, "beta_fast"),
        ("yarn", {"factor": 4.0, "attention_factor": "big"}, {}, "attention_factor"),
        ("yarn", {"factor": 4.0}, {"theta": 1.0}, "theta"),
        ("yarn", {"factor": 4.0}, {"max_positions": None}, "original"),
        ("bands", {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 3.0}, {}, "high_freq_factor"),
        ("longrope", {"short_factor": [1.0] * 3, "long_factor": [1.0] * 3}, {}, "short_factor"),
        ("longrope", {"short_factor": [1.0, 1.0, 1.0, float("nan")]}, {}, "short_factor"),
        ("factors", {}, {}, "factors"),
    ],
)
def test_bad_parameters_are_named(kind: str, scaling: dict[str, Any], change: dict[str, Any], words: str) -> None:
    parameters = {**node(Case("bad", kind, "", scaling), 8, 1e4), "scaling": scaling, **change}
    with pytest.raises(SpecError, match=words):
        frequencies(parameters, 10)


def test_frequencies_that_are_no_numbers_are_refused() -> None:
    """A divisor too small for float32: one error, no warning."""
    with pytest.raises(SpecError, match="frequencies that are no numbers"):
        frequencies({"dim": 8, "theta": 1e4, "kind": "linear", "scaling": {"factor": 1e-45}}, 10)
