"""ALiBi: its slopes and biases against transformers, in either precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as in_full
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as in_bfloat16
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as with_greatest

from inferflow.kernels.reference import alibi_bias, alibi_slopes, attend

KEYS = 2048


def relative(bias: np.ndarray) -> np.ndarray:
    """What a softmax sees of it: the bias less that of the last key."""
    return bias - bias[:, -1:]


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 32, 71, 112])
def test_biases(heads: int) -> None:
    mask = torch.ones(1, KEYS, dtype=torch.long)
    full = in_full(mask, heads, torch.float32).reshape(heads, KEYS).numpy()
    rounded = in_bfloat16(mask, heads, torch.float32).reshape(heads, KEYS).numpy()
    np.testing.assert_allclose(alibi_bias(heads, 0, KEYS, 8, False), relative(full), rtol=1e-5, atol=5e-4)
    np.testing.assert_array_equal(alibi_bias(heads, 0, KEYS, 8, True), rounded)
    np.testing.assert_array_equal(alibi_bias(heads, 700, 100, 8, True), rounded[:, 700:800])


@pytest.mark.parametrize("greatest", [4, 8, 16])
@pytest.mark.parametrize("heads", [6, 16, 20])
def test_slopes_with_another_greatest_bias(heads: int, greatest: int) -> None:
    want = with_greatest(heads, 2, greatest).numpy()
    np.testing.assert_allclose(alibi_slopes(heads, greatest), -want[:, 0, 0], rtol=1e-6)


def test_rounded_biases_see_the_position_of_the_first_key() -> None:
    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal(shape, np.float32) for shape in ((6, 8), (300, 6, 8), (300, 6, 8)))
    params = {"scale": 1.0, "softcap": None, "alibi": 8, "alibi_scale": 1.0, "alibi_dtype": "bfloat16"}
    start, later = (attend(q, k, v, first, None, params) for first in (0, 1000))
    assert np.abs(start - later).max() > 1e-3
    params["alibi_dtype"] = "float32"
    start, later = (attend(q, k, v, first, None, params) for first in (0, 1000))
    np.testing.assert_array_equal(start, later)
