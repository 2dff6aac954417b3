"""The reference kernels against PyTorch's functions and plain formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from inferflow.kernels import reference as ref

RNG = np.random.default_rng(3)
X = np.concatenate([RNG.standard_normal(2000) * 3, [0.0, -0.0, 30, -30, 90, -90, 1e-6]]).astype(np.float32)
TORCH: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
}


def params(**changes: Any) -> dict[str, Any]:
    return {"scale": 0.3, "softcap": None, "alibi": None, "alibi_scale": 1, "alibi_dtype": "float32"} | changes


@pytest.mark.parametrize("kind", TORCH)
def test_activation(kind: str) -> None:
    want = TORCH[kind](torch.from_numpy(X)).numpy()
    got = ref.ACTIVATION[kind](X)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_error_function_against_the_library() -> None:
    x = np.linspace(-7, 7, 5001)
    want = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(ref._erf(x), want, atol=1e-12)


def test_norms() -> None:
    x = RNG.standard_normal((5, 3, 16)).astype(np.float32) + 1
    w, b = RNG.standard_normal((2, 16)).astype(np.float32)
    base = {"eps": 1e-5, "add_one": False}
    t = torch.from_numpy(x)
    layer = F.layer_norm(t, (16,), torch.from_numpy(w), torch.from_numpy(b), 1e-5).numpy()
    np.testing.assert_allclose(ref.norm(x, w, b, {"kind": "layer", **base}), layer, atol=2e-6)
    rms = F.rms_norm(t, (16,), torch.from_numpy(w), 1e-5).numpy()
    np.testing.assert_allclose(ref.norm(x, w, None, {"kind": "rms", **base}), rms, atol=2e-6)
    one = F.rms_norm(t, (16,), torch.from_numpy(1 + w), 1e-5).numpy()
    np.testing.assert_allclose(ref.norm(x, w, None, {"kind": "rms", **base, "add_one": True}), one, atol=2e-6)
    l2 = F.normalize(t, dim=-1, eps=1e-5).numpy()
    np.testing.assert_allclose(ref.norm(x, None, None, {"kind": "l2", **base}), l2, atol=2e-6)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize(
    "changes",
    [{}, {"softcap": 2.0}, {"alibi": 8.0}, {"alibi": 4.0, "alibi_scale": 0.5}],
    ids=["plain", "cap", "alibi", "scaled"],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_of_one_token(heads: int, changes: dict[str, Any], sinks: bool) -> None:
    q = RNG.standard_normal((heads, 8)).astype(np.float32)
    k, v = RNG.standard_normal((11, 2, 8)).astype(np.float32), RNG.standard_normal((11, 2, 5)).astype(np.float32)
    sink = RNG.standard_normal(heads).astype(np.float32) if sinks else None
    p = params(**changes)
    want = []
    for h in range(heads):
        kv = h // (heads // 2)
        scores = k[:, kv].astype(np.float64) @ q[h] * p["scale"]
        if p["softcap"]:
            scores = p["softcap"] * np.tanh(scores / p["softcap"])
        if p["alibi"]:
            scores = scores + ref.alibi_slopes(heads, p["alibi"])[h] * p["alibi_scale"] * np.arange(-10, 1)
        e = np.exp(scores)
        total = e.sum() + (np.exp(sink[h]) if sink is not None else 0)
        want.append(e / total @ v[:, kv])
    np.testing.assert_allclose(ref.attend(q, k, v, 0, sink, p), np.array(want), atol=2e-6)


def test_alibi_slopes_are_those_of_the_paper() -> None:
    np.testing.assert_allclose(ref.alibi_slopes(8, 8), [2.0**-k for k in range(1, 9)])
    twelve = ref.alibi_slopes(12, 8)
    np.testing.assert_allclose(twelve[:8], [2.0**-k for k in range(1, 9)])
    np.testing.assert_allclose(twelve[8:], [2 ** -(k - 0.5) for k in range(1, 5)], rtol=1e-6)


def test_rotation_pairs() -> None:
    x = RNG.standard_normal((3, 2, 6)).astype(np.float32)
    inverse = np.array([1.0, 0.1], np.float32)
    positions = np.array([0, 5, 9])
    for pairing, pairs in (("half", [(0, 2), (1, 3)]), ("inter", [(0, 1), (2, 3)])):
        want = x.copy()
        for j, (a, b) in enumerate(pairs):
            c, s = np.cos(positions * inverse[j])[:, None], np.sin(positions * inverse[j])[:, None]
            want[..., a], want[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
        np.testing.assert_allclose(ref.rotate(x, positions, inverse, 1.0, pairing), want, atol=1e-6)


def test_router_scores() -> None:
    logits = RNG.standard_normal((7, 8)).astype(np.float32)
    base = {
        "top_k": 2,
        "groups": None,
        "normalise": False,
        "norm_min": 1e-20,
        "norm_eps": 0,
        "scale": 1,
        "jitter": 0.01,
    }
    probabilities = torch.softmax(torch.from_numpy(logits), -1)
    want, ids = torch.topk(probabilities, 2)
    got_ids, got = ref.router(logits, None, {**base, "score": "softmax"})
    np.testing.assert_array_equal(got_ids, ids.numpy())
    np.testing.assert_allclose(got, want.numpy(), atol=1e-6)
    _, normal = ref.router(logits, None, {**base, "score": "softmax", "normalise": True, "scale": 2.5})
    np.testing.assert_allclose(normal, (want / want.sum(-1, keepdim=True)).numpy() * 2.5, atol=1e-6)
    _, late = ref.router(logits, None, {**base, "score": "softmax_topk"})
    np.testing.assert_allclose(late, torch.softmax(torch.topk(torch.from_numpy(logits), 2)[0], -1).numpy(), atol=1e-6)
    bias = np.zeros(8, np.float32)
    bias[5] = 10
    ids_b, w_b = ref.router(logits, bias, {**base, "score": "sigmoid"})
    assert (ids_b[:, 0] == 5).all()
    np.testing.assert_allclose(w_b[:, 0], 1 / (1 + np.exp(-logits[:, 5])), atol=1e-6)


def test_router_groups_keep_the_best() -> None:
    logits = np.array([[5.0, -9, 4, 3.9, 0, 0, 1, 1]], np.float32)
    base = {
        "top_k": 2,
        "groups": 4,
        "top_groups": 1,
        "normalise": False,
        "norm_min": 0,
        "norm_eps": 0,
        "scale": 1,
        "jitter": 0,
    }
    by_max, _ = ref.router(logits, None, {**base, "score": "sigmoid", "group_score": "max"})
    by_sum, _ = ref.router(logits, None, {**base, "score": "sigmoid", "group_score": "top2_sum"})
    assert by_max.tolist() == [[0, 1]]
    assert by_sum.tolist() == [[2, 3]]


def test_a_row_does_not_know_its_batch() -> None:
    x, w = RNG.standard_normal((37, 300)).astype(np.float32), RNG.standard_normal((700, 300)).astype(np.float32)
    whole = ref.matmul(x, w)
    np.testing.assert_allclose(whole, x.astype(np.float64) @ w.T.astype(np.float64), atol=1e-3)
    for rows in (slice(0, 1), slice(3, 20), slice(36, 37)):
        np.testing.assert_array_equal(ref.matmul(x[rows], w), whole[rows])


def test_experts_are_grouped_without_mixing() -> None:
    x, w = RNG.standard_normal((9, 6)).astype(np.float32), RNG.standard_normal((4, 5, 6)).astype(np.float32)
    ids = RNG.integers(0, 4, (9, 2))
    got = ref.expert_linear(x, ids, w, None)
    want = np.einsum("td,tkod->tko", x, w[ids])
    np.testing.assert_allclose(got, want, atol=1e-5)
