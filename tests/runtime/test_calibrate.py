"""Calibration walks the same model as the reference engine, sees what later layers will see, and makes products better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferflow.errors import CheckpointError
from inferflow.kernels import reference as ref
from inferflow.runtime import calibrate
from inferflow.runtime.batch import Span, StepBatch
from inferflow.runtime.calibrate import Calibrator, attend_all, moments
from inferflow.runtime.executor import ReferenceExecutor
from inferflow.runtime.model import Model, load_model
from quant import hadamard
from tests import tiny

WIDE = {**tiny.CONFIG, "hidden_size": 128, "intermediate_size": 192, "vocab_size": 256}
WINDOWS = np.random.default_rng(0).integers(0, 256, (6, 24)).astype(np.int32)


def model(path: Path, quant: str, **config: Any) -> Model:
    merged = {**WIDE, **config}
    return load_model(tiny.write(path / "m", merged, tiny.tensors(merged)), quant=quant)


def mixture(path: Path, quant: str) -> Model:
    """Two layers of four experts."""
    config = {**WIDE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    rng = np.random.default_rng(1)
    weights = {k: v for k, v in tiny.tensors(config).items() if ".mlp." not in k}
    for layer in range(2):
        moe = f"model.layers.{layer}.block_sparse_moe"
        weights[f"{moe}.gate.weight"] = rng.standard_normal((4, 128)).astype(np.float32)
        for e in range(4):
            for name, shape in (("w1", (192, 128)), ("w2", (128, 192)), ("w3", (192, 128))):
                noise = rng.standard_normal(shape).astype(np.float32)
                weights[f"{moe}.experts.{e}.{name}.weight"] = noise * np.float32(shape[-1] ** -0.5)
    return load_model(tiny.write(path / "moe", config, weights), quant=quant)


def batch(windows: np.ndarray, block: int) -> StepBatch:
    count, length = windows.shape
    per = -(-length // block)
    spans = tuple(Span(n * length, length, 0, tuple(range(n * per, (n + 1) * per)), length) for n in range(count))
    return StepBatch(
        windows.reshape(-1).astype(np.int64), np.tile(np.arange(length), count), spans, np.arange(windows.size)
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"window": 5},
        {"chunk": 7},
        {"softcap": 2.0},
        {"alibi": 8.0, "alibi_scale": 0.7},
        {"alibi": 8.0, "alibi_dtype": "bfloat16"},
        {"sinks": True},
    ],
    ids=lambda p: "-".join(p) or "plain",
)
def test_whole_windows_attend_as_one_token_after_the_other(params: dict[str, Any]) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((17, n, 8)).astype(np.float32) for n in (6, 2, 2))
    sinks = rng.standard_normal(6).astype(np.float32) if params.pop("sinks", False) else None
    full = {"scale": 0.4, "window": None, "chunk": None, "softcap": None, "alibi": None, "alibi_scale": 1.0,
            "alibi_dtype": "float32", **params}  # fmt: skip
    got = attend_all(q, k, v, sinks, full)
    for t in range(17):
        first = max(0, t - params.get("window", 99) + 1, t // params.get("chunk", 99) * params.get("chunk", 99))
        seen = slice(first, t + 1)
        np.testing.assert_allclose(got[t], ref.attend(q[t], k[seen], v[seen], first, sinks, full), rtol=2e-5, atol=2e-6)


def test_moments_are_of_the_rotated_padded_inputs() -> None:
    x = np.random.default_rng(3).standard_normal((50, 100)).astype(np.float32)
    rotated = hadamard(np.pad(x, [(0, 0), (0, 28)]), 64)
    np.testing.assert_allclose(moments(x, 64), rotated.T @ rotated / 50, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [model, mixture])
def test_the_walk_is_the_reference_engines(make: Any, tmp_path: Path) -> None:
    """With nothing quantised but the output, what comes before it is the reference's, to rounding."""
    loaded = make(tmp_path, "output=q4")
    calibrator = Calibrator(loaded, WINDOWS, 64)
    seen: dict[str, np.ndarray] = {}
    plain = calibrator.calibrated

    def spy(key: str, format_: str, inputs: Any, ids: Any) -> Any:
        seen[key] = inputs.x
        return plain(key, format_, inputs, ids)

    calibrator.calibrated = spy  # type: ignore[method-assign]
    keys = list(loaded.weights.formats)
    made = dict(calibrator.matrices(keys))
    assert sorted(made) == sorted(keys)
    assert {key: stored.format for key, stored in made.items() if stored.format != "f32"} == {"output.weight": "q4"}
    assert list(seen) == ["output.weight"]
    executor = ReferenceExecutor(loaded.graph, loaded.weights)
    step = batch(WINDOWS, executor.block_size)
    name = next(n for n, v in loaded.graph.names.items() if v == loaded.graph.nodes[-1].inputs[0])
    expected = executor.capture(step, executor.cache(6 * 2), [name])[name]
    rounded = ref.round_activations(expected, 64, 64)
    assert np.abs(seen["output.weight"] - rounded).max() <= 0.02 * np.abs(rounded).max()  # a step of the rounding
    assert np.abs(seen["output.weight"] - rounded).mean() <= 1e-4


@pytest.mark.parametrize("make", [model, mixture])
def test_calibrated_products_are_nearer(make: Any, tmp_path: Path) -> None:
    loaded = make(tmp_path, "q3,token_embd=keep,output=q3")
    rng = np.random.default_rng(5)
    common = rng.integers(0, 256, 12)
    windows = common[rng.integers(0, 12, (8, 32))].astype(np.int32)  # few tokens: inputs are far from white
    keys = [key for key in loaded.weights.formats if loaded.weights.formats[key] == "q3"]
    assert len(keys) > 10
    calibrator = Calibrator(loaded, windows, 64)
    inputs: dict[str, np.ndarray] = {}
    plain = calibrator.calibrated

    def spy(key: str, format_: str, seen: Any, ids: Any) -> Any:
        if ids is None:
            inputs[key] = seen.x.reshape(-1, seen.x.shape[-1])
        return plain(key, format_, seen, ids)

    calibrator.calibrated = spy  # type: ignore[method-assign]
    better = []
    for key, stored in calibrator.matrices(keys):
        assert stored.shape == loaded.graph.weights[key].sizes
        if key in inputs:
            exact = loaded.weights.read(key)
            errors = [
                np.square(inputs[key] @ (exact - other.widen()).T).sum() for other in (stored, loaded.weights.make(key))
            ]
            better.append(errors[0] / errors[1])
    assert len(better) >= 5
    assert max(better) < 0.9
    assert np.mean(better) < 0.6


def test_drift_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last matrix is reached, what it sees is nearer to what the original model has."""
    loaded = model(tmp_path, "q3,token_embd=keep")
    windows = np.random.default_rng(6).integers(0, 256, (16, 32)).astype(np.int32)

    def drift() -> float:
        calibrator, last = Calibrator(loaded, windows, 64), {}
        plain = calibrator.calibrated

        def spy(key: str, format_: str, seen: Any, ids: Any) -> Any:
            last["error"] = np.square(seen.original - seen.x).mean() / np.square(seen.original).mean()
            return plain(key, format_, seen, ids)

        calibrator.calibrated = spy  # type: ignore[method-assign]
        list(calibrator.matrices(list(loaded.weights.formats)))
        return float(last["error"])

    taken = drift()
    monkeypatch.setattr(calibrate, "ridge", lambda x, y: np.zeros((x.shape[1], y.shape[1]), np.float32))
    assert taken < 0.95 * drift()


@pytest.mark.parametrize("rows", [30, 90])
def test_ridge_is_the_regression(rows: int) -> None:
    rng = np.random.default_rng(7)
    x, y = (rng.standard_normal((rows, n)).astype(np.float32) for n in (50, 4))
    r = calibrate.RIDGE * np.square(x).sum() / 50
    want = np.linalg.lstsq(np.vstack([x, np.sqrt(r) * np.eye(50)]), np.vstack([y, np.zeros((50, 4))]), rcond=None)[0]
    np.testing.assert_allclose(calibrate.ridge(x, y), want, rtol=1e-4, atol=1e-5)


def test_a_tied_matrix_is_made_once_at_the_end(tmp_path: Path) -> None:
    config = {**WIDE, "tie_word_embeddings": True}
    weights = {k: v for k, v in tiny.tensors(config).items() if k != "lm_head.weight"}
    loaded = load_model(tiny.write(tmp_path / "m", config, weights), quant="q4")
    keys = [key for key in loaded.weights.formats if key != "output.weight"]
    made = list(Calibrator(loaded, WINDOWS, 64).matrices(keys))
    assert sorted(key for key, _ in made) == sorted(keys)
    assert made[-1][0] == "token_embd.weight"
    uncalibrated = loaded.weights.make("token_embd.weight")
    assert made[-1][1].codes.tobytes() != uncalibrated.codes.tobytes()


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    weights = tiny.tensors(WIDE)
    weights["model.embed_tokens.weight"][WINDOWS[0, 0]] = np.nan
    loaded = load_model(tiny.write(tmp_path / "a", WIDE, weights), quant="q4,token_embd=keep")
    with pytest.raises(CheckpointError, match=r"/a/.*: tensor 'model\.embed_tokens\.weight': holds numbers"):
        list(Calibrator(loaded, WINDOWS, 64).matrices(list(loaded.weights.formats)))
    weights = tiny.tensors(WIDE)
    weights["model.layers.0.mlp.up_proj.weight"] *= np.float32(1e30)  # finite, but not the squares of what comes of it
    loaded = load_model(tiny.write(tmp_path / "b", WIDE, weights), quant="q4")
    with pytest.raises(CheckpointError, match=r"/b/.*: tensor 'model\.layers\.0\.mlp\.down_proj\.weight': cannot be"):
        list(Calibrator(loaded, WINDOWS, 64).matrices(list(loaded.weights.formats)))
