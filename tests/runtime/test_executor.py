"""What flows compute, on specs without layers' weights in the way: positions, ranges, sinusoids, turned rotations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from inferflow.runtime.engine import Engine
from inferflow.runtime.executor import ReferenceExecutor
from inferflow.runtime.model import load_model

SPEC = """
[model]
kind = "causal-lm"
flow = ["x = layers(token_embd(tokens))", "logits = output(x)"]
[token_embd]
block = "embed"
rows = 5
dim = 6
[output]
block = "linear"
out = 5
[layers]
count = 1
flow = [%s]
[tensors]
token_embd = "e"
output = "o"
%s
"""
IDS = [1, 4, 2, 0, 3, 3, 1]
E = np.random.default_rng(2).standard_normal((5, 6)).astype(np.float32)
P = np.arange(len(IDS), dtype=np.float32)


def captured(folder: Path, flow: str, *names: str, rest: str = "") -> list[np.ndarray]:
    """The named tensors of the flow (";" between lines) of the one layer; the same bits token by token."""
    lines = ", ".join(f'"{line}"' for line in flow.split("; "))
    (folder / "s.toml").write_text(SPEC % (lines, rest), "utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "own"}), "utf-8")
    save_file({"e.weight": E, "o.weight": E}, folder / "model.safetensors")
    model = load_model(folder, folder / "s.toml")
    engine = Engine(model.graph, ReferenceExecutor(model.graph, model.weights), max_len=16)
    logits = engine.forward(IDS)["logits"]
    np.testing.assert_array_equal(engine.forward(IDS, chunk=1)["logits"], logits)
    out = engine.forward(IDS, [f"layers.0.{name}" for name in names])
    return [out[f"layers.0.{name}"] for name in names]


def test_functions_of_the_positions(tmp_path: Path) -> None:
    flow = (
        "a = sin(positions); b = cos(positions * 1000) + ceil(positions / 2); c = clamp(positions, 3); x += a + b + c"
    )
    a, b, c = captured(tmp_path, flow, "a", "b", "c")
    assert {a.dtype, b.dtype, c.dtype} == {np.dtype(np.float32)}
    np.testing.assert_allclose(a, np.sin(P), atol=1e-7)
    np.testing.assert_allclose(b, np.cos(P.astype(np.float64) * 1000) + np.ceil(P / 2), atol=1e-6)
    np.testing.assert_array_equal(c, np.minimum(P, 3))


def test_a_vector_of_each_token(tmp_path: Path) -> None:
    flow = (
        "r = range(3); a = outer(positions, r + 1); b = outer(heads(x, 2), r); x += concat(a, a) + sum(merge(merge(b)))"
    )
    r, a, b = captured(tmp_path, flow, "r", "a", "b")
    np.testing.assert_array_equal(r, [0, 1, 2])
    np.testing.assert_array_equal(a, P[:, None] * [1, 2, 3])
    np.testing.assert_array_equal(b, E[IDS].reshape(-1, 2, 3, 1) * np.float32([0, 1, 2]))
    assert a.dtype == np.float32


def test_sinusoids(tmp_path: Path) -> None:
    rest = '[layers.p]\nblock = "sinusoid"\ndim = 6\noffset = 2\n'
    rest += '[layers.z]\nblock = "sinusoid"\ndim = 6\nsteps = 3\nbase = 100\n'
    p, z = captured(tmp_path, "p = p(positions); z = z(positions); x += p + z", "p", "z", rest=rest)
    for table, offset, base, steps in ((p, 2, 10000, 2), (z, 0, 100, 3)):
        for t in range(len(IDS)):
            angles = [(t + offset) * base ** (-j / steps) for j in range(3)]
            want = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            np.testing.assert_allclose(table[t], want, atol=1e-5)


def test_a_rotation_the_other_way(tmp_path: Path) -> None:
    """Turning back what was turned gives it back; a half turned and swapped is a turn the other way."""
    flow = "q = rope(x, dim=4, reverse=True); back = rope(q, dim=4); x += back"
    q, back = captured(tmp_path, flow, "q", "back")
    np.testing.assert_allclose(back, E[IDS], atol=1e-6)
    want = E[IDS][:, 0] * np.cos(P) + E[IDS][:, 2] * np.sin(P)
    np.testing.assert_allclose(q[:, 0], want, atol=1e-6)
