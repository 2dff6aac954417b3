"""Safetensors sources against the format's own library: values, views, shards, and the config beside them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from inferflow.weights.config import load_config
from inferflow.weights.open import open_source
from inferflow.weights.source import Source
from tests.weights.craft import entry, safetensors, write

RNG = np.random.default_rng(0)


def directory(path: Path, config: str = '{"hidden_size": 8}') -> Path:
    write(path / "config.json", config)
    return path


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    return got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "uint8", "int16", "int32", "int64", "bool"])
def test_numpy_types_round_trip(dtype: str, tmp_path: Path) -> None:
    arrays = {
        "matrix": (RNG.standard_normal((5, 7)) * 50).astype(dtype),
        "scalar": np.array(1, dtype),
        "empty": np.zeros((0, 3), dtype),
        "cube": np.ones((2, 3, 4), dtype),
    }
    save_file(arrays, directory(tmp_path) / "model.safetensors", {"format": "pt"})
    source = open_source(tmp_path)
    assert set(source.tensors) == set(arrays)
    for name, array in arrays.items():
        assert same(source.read(name), array.astype("float32") if "float" in dtype else array)
        assert source.tensors[name].nbytes == array.nbytes
        assert source.raw(name).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_code_of_a_narrow_float_widens_exactly(dtype: str, tmp_path: Path) -> None:
    bits = torch.arange(65536).to(torch.uint16) if "16" in dtype else torch.arange(256).to(torch.uint8)
    tensor = bits.view(getattr(torch, dtype))
    save_torch({"w": tensor}, directory(tmp_path) / "model.safetensors")
    np.testing.assert_array_equal(open_source(tmp_path).read("w"), tensor.float().numpy())


def test_double_rounds_to_nearest_and_to_infinity(tmp_path: Path) -> None:
    values = np.array([0.1, 1e300, -1e300, np.nan, 1e-320])
    save_file({"w": values}, directory(tmp_path) / "model.safetensors")
    np.testing.assert_array_equal(open_source(tmp_path).read("w"), np.float32([0.1, np.inf, -np.inf, np.nan, 0]))


def test_float32_is_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    array = RNG.standard_normal((64, 64)).astype(np.float32)
    save_file({"w": array}, directory(tmp_path) / "model.safetensors")
    source = open_source(tmp_path)
    view = source.read("w")
    assert np.shares_memory(view, source.raw("w"))
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    source.close()
    assert same(view, array)  # a view outlives its source


def test_an_odd_header_length_gives_an_aligned_copy(tmp_path: Path) -> None:
    data = np.arange(6, dtype=np.float32)
    blob = safetensors(json.dumps({"w": entry([2, 3], 0, 24)}) + " ", data.tobytes())
    while len(blob) % 4 == 0:
        blob = safetensors(blob[8:-24] + b" ", data.tobytes())
    write(directory(tmp_path) / "model.safetensors", blob)
    got = open_source(tmp_path).read("w")
    assert got.flags.aligned
    np.testing.assert_array_equal(got, data.reshape(2, 3))


def sharded(path: Path, *, with_index: bool) -> dict[str, np.ndarray]:
    arrays = {f"layer.{i}": RNG.standard_normal((3, i + 1)).astype(np.float32) for i in range(5)}
    weight_map = {}
    for number in (1, 2):
        part = {name: array for i, (name, array) in enumerate(arrays.items()) if i % 2 == number - 1}
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file(part, directory(path) / shard)
        weight_map |= dict.fromkeys(part, shard)
    if with_index:
        write(path / "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": weight_map}))
    return arrays


@pytest.mark.parametrize("with_index", [True, False])
def test_shards(with_index: bool, tmp_path: Path) -> None:
    arrays = sharded(tmp_path, with_index=with_index)
    sources: list[Source] = [open_source(tmp_path), open_source(tmp_path / "model-00002-of-00002.safetensors")]
    for source in sources:
        assert set(source.tensors) == set(arrays)
        assert all(same(source.read(name), array) for name, array in arrays.items())


def test_the_index_decides_which_of_two_copies_counts(tmp_path: Path) -> None:
    sharded(tmp_path, with_index=True)
    stale = {"layer.0": np.zeros((3, 1), np.float32), "layer.1": np.ones((3, 2), np.float32)}
    save_file({**stale, "layer.3": np.ones((3, 4), np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    source = open_source(tmp_path)
    assert source.read("layer.0").any()
    assert (source.read("layer.1") == 1).all()


def test_one_file_of_any_name(tmp_path: Path) -> None:
    save_file({"w": np.ones(3, np.float32)}, directory(tmp_path) / "weights.safetensors")
    for path in (tmp_path, tmp_path / "weights.safetensors"):
        source = open_source(path)
        assert source.path in (path, tmp_path / "weights.safetensors")
        assert source.config == {"hidden_size": 8}
        assert source.metadata == {}


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    save_file({"w": np.ones(3, np.float32)}, directory(tmp_path) / "model.bin")
    assert open_source(tmp_path / "model.bin").format == "safetensors"


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    """The hub's cache holds links into its blobs."""
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "blob")
    snapshot = directory(tmp_path / "snapshot")
    (snapshot / "model.safetensors").symlink_to("../blob")
    assert (open_source(snapshot).read("w") == 1).all()


def test_config_with_generation_and_infinity(tmp_path: Path) -> None:
    directory(
        tmp_path, '\ufeff{"time_step_limit": [0.0, Infinity], "low": {"__float__": "-Infinity"}, "eos_token_id": 2}'
    )
    write(tmp_path / "generation_config.json", '{"eos_token_id": [2, 7]}')
    config = load_config(tmp_path)
    assert config["time_step_limit"] == [0.0, math.inf]
    assert config["low"] == -math.inf
    assert config["generation"] == {"eos_token_id": [2, 7]}
