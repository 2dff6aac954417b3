"""Torch archives against torch itself: types, strides, wrappers, shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferflow.weights.open import open_source
from tests.weights.craft import write

TYPES = ["float64", "float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool", "uint16"]
TYPES += ["float8_e4m3fn", "float8_e5m2"]


def saved(path: Path, state: Any, name: str = "pytorch_model.bin") -> Path:
    write(path / "config.json", "{}")
    torch.save(state, path / name)
    return path


def expected(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def check(path: Path, state: dict[str, torch.Tensor]) -> None:
    source = open_source(path)
    assert list(source.tensors) == list(state)
    for name, tensor in state.items():
        got, want = source.read(name), expected(tensor)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
        assert source.tensors[name].shape == tuple(tensor.shape)
        assert source.raw(name).size == source.tensors[name].nbytes


@pytest.mark.parametrize("dtype", TYPES)
def test_types(dtype: str, tmp_path: Path) -> None:
    tensor = (torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 40).to(getattr(torch, dtype))
    check(saved(tmp_path, {"w": tensor}), {"w": tensor})


def test_views_parameters_and_odd_shapes(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "base": base,
        "transposed": base.t(),
        "window": base[1:3, 2:5],
        "tail": base.reshape(-1)[7:],
        "every second": base[::2, ::3],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "permuted": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    }
    check(saved(tmp_path, state), state)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_wrapped_state_dicts(key: str, tmp_path: Path) -> None:
    state = {"w": torch.ones(2, 3)}
    check(saved(tmp_path, {key: state, "epoch": 3, "lr": 0.1, "done": False, "names": ["a"], "none": None}), state)


def test_a_module_with_many_tensors(tmp_path: Path) -> None:
    module = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(700)])
    check(saved(tmp_path, module.state_dict()), module.state_dict())


def test_contiguous_float32_is_mapped_in_place(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path, {"w": torch.ones(64, 64)}))
    view = source.read("w")
    assert np.shares_memory(view, source.raw("w"))
    assert not view.flags.writeable


def test_shards(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(3)}
    names = {key: f"pytorch_model-{i:05d}-of-00002.bin" for i, key in enumerate(state, 1)}
    for key, name in names.items():
        saved(tmp_path, {key: state[key]}, name)
    write(tmp_path / "pytorch_model.bin.index.json", json.dumps({"weight_map": names}))
    check(tmp_path, state)
    assert open_source(tmp_path).format == "torch"
