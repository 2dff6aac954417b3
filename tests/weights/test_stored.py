"""What engines are given: float formats, views of the file, tied weights, and that `array` tells the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inferflow.errors import CheckpointError
from inferflow.runtime.model import load_model
from inferflow.weights.stored import from_float, narrowest
from tests import tiny

EDGES = np.array([0.0, -0.0, 1.0, -1.5, 65504.0, 65520.0, 1e-8, 3e38, np.inf, -np.inf, np.nan, 1 + 2**-8], np.float32)


def test_floats_are_rounded_to_the_nearest() -> None:
    import torch

    noise = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for values in (EDGES, noise, noise * np.float32(1e-39)):
        for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
            expected = torch.from_numpy(values).to(dtype).to(torch.float32).numpy()
            np.testing.assert_array_equal(from_float(values, name).widen(), expected)


@pytest.mark.parametrize("format_", ["f32", "f16", "bf16"])
def test_finite_floats_are_told_from_others(format_: str) -> None:
    assert from_float(np.array([1.0, -3e4, 0.0, 1e-8], np.float32), format_).finite()
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        assert not from_float(np.array([1.0, bad], np.float32), format_).finite()


def test_what_is_held_as_float16_falls_back_where_it_overflows(tmp_path: Path) -> None:
    tensors = tiny.tensors()
    tensors["lm_head.weight"][2, 3] = 1 << 17
    tensors["model.layers.0.mlp.up_proj.weight"][2, 3] = np.nan
    weights = load_model(tiny.write(tmp_path / "m", weights=tensors), quant="f16").weights
    np.testing.assert_array_equal(weights.array("output.weight"), tensors["lm_head.weight"])
    assert [(f.key, f.wanted) for f in weights.fallbacks] == [("output.weight", "f16")]
    with pytest.raises(
        CheckpointError, match=r"/m/model\.safetensors: tensor 'model\.layers\.0\.mlp\.up_proj\.weight': holds"
    ):
        weights.stored("layers.0.ffn_up.weight")


def test_the_narrowest_float_is_an_exact_one() -> None:
    assert narrowest(np.array([1.5, -2.0, np.inf], np.float32)).format == "bf16"
    assert narrowest(np.array([1 + 2**-9, 2.0], np.float32)).format == "f16"
    assert narrowest(np.array([1 + 2**-9, 1e9], np.float32)).format == "f32"


@pytest.mark.parametrize(("dtype", "format_"), [(np.float32, "f32"), (np.float16, "f16")])
def test_what_the_file_has_is_viewed_not_copied(dtype: type, format_: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m", weights={k: v.astype(dtype) for k, v in tiny.tensors().items()})
    weights = load_model(path).weights
    for key in weights.formats:
        stored = weights.stored(key)
        assert stored.format == format_
        assert np.shares_memory(stored.codes, weights.source.raw(weights.plans[key].names[0]))
        assert not stored.codes.flags.writeable
        np.testing.assert_array_equal(stored.widen(), weights.array(key))
    assert "layers.0.attn_norm.weight" not in weights.formats
    assert weights.stored("layers.1.ffn_up.weight").nbytes == 48 * 32 * np.dtype(dtype).itemsize


def test_bfloat16_is_its_bits(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    folder = tiny.write(tmp_path / "m")
    save_torch(
        {k: torch.from_numpy(v).to(torch.bfloat16) for k, v in tiny.tensors().items()}, folder / "model.safetensors"
    )
    weights = load_model(folder).weights
    stored = weights.stored("output.weight")
    assert (stored.format, stored.codes.dtype) == ("bf16", np.uint16)
    np.testing.assert_array_equal(stored.widen(), weights.array("output.weight"))


def test_tied_weights_are_one_object(tmp_path: Path) -> None:
    config = {**tiny.CONFIG, "tie_word_embeddings": True}
    tensors = {k: v for k, v in tiny.tensors().items() if k != "lm_head.weight"}
    weights = load_model(tiny.write(tmp_path / "m", config, tensors)).weights
    keys = [key for key in weights.formats if weights.plans[key].names == ("model.embed_tokens.weight",)]
    assert len({id(weights.stored(key)) for key in keys}) == 1
    assert len({id(weights.array(key)) for key in keys}) == 1


def test_a_tensor_at_an_odd_place_is_copied(tmp_path: Path) -> None:
    """The format does not ask for alignment."""
    tensors = tiny.tensors()
    folder = tiny.write(tmp_path / "m", weights={"a.position_ids": np.zeros(3, np.uint8), **tensors})
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    moved = (size + 1).to_bytes(8, "little") + raw[8 : 8 + size] + b" " + raw[8 + size :]
    (folder / "model.safetensors").write_bytes(moved)
    stored = load_model(folder).weights.stored("output.weight")
    assert stored.codes.flags.aligned
    np.testing.assert_array_equal(stored.codes, tensors["lm_head.weight"])
