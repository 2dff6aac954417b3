"""Tensors stored apart from their scales: values against transformers and torch, pairs that fit, and pairs that do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from inferflow.errors import CheckpointError, UnsupportedError
from inferflow.weights.open import open_source
from inferflow.weights.source import Source


def saved(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Source:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return open_source(folder)


def test_every_pair_of_codes_and_every_scale(tmp_path: Path) -> None:
    blocks = torch.arange(256).repeat(2, 16, 1).reshape(2, 16, 16, 16).to(torch.uint8)
    scales = torch.arange(2 * 16 * 16).reshape(2, 16, 16).remainder(255).to(torch.uint8)
    source = saved(tmp_path, {"w_blocks": blocks, "w_scales": scales})
    info = source.tensors["w_blocks"]
    assert list(source.tensors) == ["w_blocks"]
    assert (info.shape, info.dtype, info.nbytes) == ((2, 16, 512), "MXFP4", blocks.numel() + scales.numel())
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    got = source.read("w_blocks")
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want.numpy())
    with pytest.raises(UnsupportedError, match="two parts"):
        source.raw("w_blocks")


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    scales = torch.tensor([[127, 255]], dtype=torch.uint8)
    source = saved(tmp_path, {"w_blocks": torch.zeros(1, 2, 16, dtype=torch.uint8), "w_scales": scales})
    with pytest.raises(CheckpointError, match="not a number"):
        source.read("w_blocks")


@pytest.mark.parametrize(
    ("tile", "config"), [((128, 128), {}), ((2, 3), {"quantization_config": {"weight_block_size": [2, 3]}})]
)
def test_tiles_of_eight_bits(tile: tuple[int, int], config: dict[str, object], tmp_path: Path) -> None:
    rows, columns = 131, 257
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // tile[0]), -(-columns // tile[1]), generator=torch.Generator().manual_seed(1))
    source = saved(tmp_path, {"m.weight": w, "m.weight_scale_inv": scales}, **config)
    assert list(source.tensors) == ["m.weight"]
    factor = scales.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
    np.testing.assert_array_equal(source.read("m.weight"), (w.float() * factor).numpy())


@pytest.mark.parametrize(
    "tensors",
    [
        {"w_blocks": torch.zeros(4, 2, 16, dtype=torch.uint8), "w_scales": torch.zeros(4, 3, dtype=torch.uint8)},
        {"w_blocks": torch.zeros(4, 2, 16, dtype=torch.int8), "w_scales": torch.zeros(4, 2, dtype=torch.uint8)},
        {"w_blocks": torch.zeros(16, dtype=torch.uint8), "w_scales": torch.zeros((), dtype=torch.uint8)},
        {"w": torch.zeros(130, 2).to(torch.float8_e4m3fn), "w_scale_inv": torch.zeros(1, 1)},
        {"w": torch.zeros(130, 2), "w_scale_inv": torch.zeros(2, 1)},
        {"w_blocks": torch.zeros(4, 2, 16, dtype=torch.uint8)},
    ],
)
def test_what_does_not_fit_stays_apart(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    source = saved(tmp_path, tensors)
    assert {name: info.shape for name, info in source.tensors.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    for name in tensors:
        assert source.read(name).shape == tuple(tensors[name].shape)
