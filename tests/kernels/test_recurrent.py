"""The primitives with a state, against plain formulas; chunks of any size give the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferflow.kernels.recurrent import causal_conv, recurrence

RNG = np.random.default_rng(5)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bias", [False, True])
def test_convolution_is_that_of_torch(bias: bool) -> None:
    x, w, b = draw(11, 5), draw(5, 4), draw(5) if bias else None
    padded = torch.from_numpy(np.concatenate([np.zeros((3, 5), np.float32), x])).T[None]
    want = torch.nn.functional.conv1d(
        padded, torch.from_numpy(w)[:, None], None if b is None else torch.from_numpy(b), groups=5
    )
    got, state = causal_conv(x, w, b, np.zeros((3, 5), np.float32))
    np.testing.assert_allclose(got, want[0].T.numpy(), atol=1e-5)
    np.testing.assert_array_equal(state, x[-3:])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_recurrence_is_its_formula(groups: int, per_channel: bool, delta: bool) -> None:
    q, k, v = draw(6, groups, 3), draw(6, groups, 3), draw(6, 4, 2)
    decay = np.abs(draw(6, 4, 3)) if per_channel else np.abs(draw(6, 4))
    beta = np.abs(draw(6, 4)) if delta else None
    start = draw(4, 3, 2)
    got, left = recurrence(q, k, v, decay, beta, start)
    for h in range(4):
        g = h // (4 // groups)
        s = start[h].astype(np.float64)
        for t in range(6):
            s = (decay[t, h][:, None] if per_channel else decay[t, h]) * s
            value = v[t, h] if beta is None else beta[t, h] * (v[t, h] - k[t, g] @ s)
            s = s + np.outer(k[t, g], value)
            np.testing.assert_allclose(got[t, h], q[t, g] @ s, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(left[h], s, rtol=1e-4, atol=1e-5)


def test_chunks_give_the_same_bits() -> None:
    q, k, v, decay, beta = draw(9, 2, 3), draw(9, 2, 3), draw(9, 4, 2), np.abs(draw(9, 4)), np.abs(draw(9, 4))
    x, w = draw(9, 5), draw(5, 4)
    whole, _ = recurrence(q, k, v, decay, beta, np.zeros((4, 3, 2), np.float32))
    conv, _ = causal_conv(x, w, None, np.zeros((3, 5), np.float32))
    state, inputs = np.zeros((4, 3, 2), np.float32), np.zeros((3, 5), np.float32)
    for at, n in ((0, 1), (1, 2), (3, 5), (8, 1)):
        rows = slice(at, at + n)
        y, state = recurrence(q[rows], k[rows], v[rows], decay[rows], beta[rows], state)
        np.testing.assert_array_equal(y, whole[rows])
        z, inputs = causal_conv(x[rows], w, None, inputs)
        np.testing.assert_array_equal(z, conv[rows])
