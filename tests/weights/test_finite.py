"""Numbers that are not finite: no quantised model is made of them, none is loaded with them, and they are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from inferflow.errors import CheckpointError
from inferflow.runtime.model import load_model
from tests import tiny
from tests.weights.test_quantised import KEY, WIDE, gguf, made, quantised, rewritten  # noqa: F401 - `made` is a fixture


@pytest.mark.parametrize("quant", ["f16", "bf16", "f32", "q8", "q3.5", "keep,output=f16"])
@pytest.mark.parametrize("name", ["model.norm", "model.layers.1.mlp.down_proj"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(quant: str, name: str, value: float, tmp_path: Path) -> None:
    weights = {k: v for k, v in tiny.tensors(WIDE).items() if k != "lm_head.weight"}
    weights[f"{name}.weight"][3] = value
    model = load_model(tiny.write(tmp_path / "m", WIDE, weights), quant=quant)
    with pytest.raises(
        CheckpointError, match=rf"/m/model\.safetensors: tensor '{name}\.weight': holds numbers that are not finite"
    ):
        quantised(model, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_kept_blocks_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf")
    block = load_model(path).source.raw("blk.1.attn_k.weight").reshape(-1)[:34].tobytes()  # Q8_0: a float16, 32 bytes
    data = path.read_bytes()
    assert data.count(block) == 1
    path.write_bytes(data.replace(block, b"\x00\x7c" + block[2:]))
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.1\.attn_k\.weight': holds numbers that"):
        quantised(load_model(path), tmp_path / "q")


def test_what_float16_cannot_hold_falls_back(tmp_path: Path) -> None:
    weights = {k: v for k, v in tiny.tensors(WIDE).items() if k != "lm_head.weight"}
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = 65520
    report = quantised(load_model(tiny.write(tmp_path / "m", WIDE, weights), quant="f16"), tmp_path / "q")
    assert list(map(str, report.fallbacks)) == [
        "layers.0.ffn_up.weight is f32, not f16: it holds numbers too large for f16"
    ]
    assert report.formats["f16"][0] == 14
    np.testing.assert_array_equal(
        load_model(tmp_path / "q").weights.array("layers.0.ffn_up.weight"), weights["model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.parametrize("name", ["layers.0.attn_norm.weight", f"{KEY}.rows"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_norms_and_scales_that_are_not_finite(name: str, value: float, made: Path, tmp_path: Path) -> None:  # noqa: F811
    bad = tmp_path / "q"
    shutil.copytree(made, bad)
    rewritten(bad, lambda arrays: arrays[name].view(-1)[3:4].fill_(value))
    weights = load_model(bad).weights
    with pytest.raises(CheckpointError, match=f"'{name}' holds numbers that are not finite"):
        weights.array(name.removesuffix(".rows"))
