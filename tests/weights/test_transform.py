"""The one transform: every stored layout against the formula it stands for, in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from inferflow.errors import SpecError
from inferflow.spec.document import Where
from inferflow.spec.expression import DictScope
from inferflow.weights.transform import Transform, map_values, parse_axes

WHERE = Where("s.toml", 2, 3)
H, KV, HD, D, FF, E, R, NOPE, VD = 4, 2, 2, 8, 6, 3, 3, 2, 5
Formula = Callable[[np.ndarray], list[np.ndarray]]


def made(axes: str, split: str | None = None, sizes: tuple[int, ...] = (), part: int = 0, **known: int) -> Transform:
    lhs, rhs = parse_axes(axes, WHERE)
    return Transform(lhs, rhs, split, sizes, part, known, None, WHERE, WHERE)


def per_head(w: np.ndarray) -> list[np.ndarray]:
    return [w.reshape(H, 3, HD, -1)[:, n].reshape(H * HD, -1) for n in range(3)]


def per_group(w: np.ndarray) -> list[np.ndarray]:
    cut = w.reshape(KV, H // KV + 2, HD, -1)
    return [cut[:, :-2].reshape(H * HD, -1), cut[:, -2].reshape(KV * HD, -1), cut[:, -1].reshape(KV * HD, -1)]


def expert_halves(w: np.ndarray) -> list[np.ndarray]:
    return [np.stack([w[e].T[:FF] for e in range(E)]), np.stack([w[e].T[FF:] for e in range(E)])]


def expert_rows(w: np.ndarray) -> list[np.ndarray]:
    return [np.stack([w[e].T[n::2] for e in range(E)]) for n in range(2)]


def latent(w: np.ndarray) -> list[np.ndarray]:
    cut = w.reshape(H, NOPE + VD, R)
    return [cut[:, :NOPE].reshape(H * NOPE, R), cut[:, NOPE:].reshape(H * VD, R)]


def hybrid(w: np.ndarray) -> list[np.ndarray]:
    cut = w.reshape(KV, 2 + 2 + 4 + 4, D)
    return [cut[:, a:b].reshape(-1, D) for a, b in ((0, 2), (2, 4), (4, 8), (8, 12))]


def unpermuted(w: np.ndarray) -> list[np.ndarray]:
    """What undoes a converter's permutation of q: pairs of rows back to halves."""
    return [np.concatenate([np.concatenate([h[0::2], h[1::2]]) for h in np.split(w, H)])]


CASES: dict[str, tuple[tuple[int, ...], tuple[str, str | None, tuple[int, ...], dict[str, int]], Formula]] = {
    "one dimension kept": ((D,), ("d", None, (), {}), lambda w: [w]),
    "in, out, fused": ((D, 3 * D), ("in (part x) -> (part x) in", "part", (1, 1, 1), {}), lambda w: np.split(w.T, 3)),
    "in, out": ((D, FF), ("in out -> out in", None, (), {}), lambda w: [w.T]),
    "each head": ((3 * H * HD, D), ("(h part hd) in", "part", (1, 1, 1), {"h": H}), per_head),
    "each group": (((H + 2 * KV) * HD, D), ("(g part hd) in", "part", (H // KV, 1, 1), {"g": KV}), per_group),
    "one after another": ((16, D), ("part in", "part", (8, 4, 4), {}), lambda w: np.split(w, [8, 12])),
    "gate and up": ((2 * FF, D), ("part in", "part", (FF, FF), {}), lambda w: np.split(w, 2)),
    "experts, halves, transposed": (
        (E, D, 2 * FF),
        ("e in (part ff) -> e (part ff) in", "part", (1, 1), {}),
        expert_halves,
    ),
    "experts, rows, transposed": (
        (E, D, 2 * FF),
        ("e in (ff part) -> e (ff part) in", "part", (1, 1), {}),
        expert_rows,
    ),
    "experts below another": (
        (E * FF, D),
        ("(e ff) in -> e ff in", None, (), {"e": E}),
        lambda w: [w.reshape(E, FF, D)],
    ),
    "the same, transposed": (
        (E * FF, D),
        ("(e ff) in -> e in ff", None, (), {"e": E}),
        lambda w: [w.reshape(E, FF, D).swapaxes(1, 2)],
    ),
    "latent keys and values": ((H * (NOPE + VD), R), ("(h part) r", "part", (NOPE, VD), {"h": H}), latent),
    "four of a key head": ((KV * 12, D), ("(kh part) in", "part", (2, 2, 4, 4), {"kh": KV}), hybrid),
    "pairs to halves": ((H * 4, D), ("(h p two) in -> (h two p) in", None, (), {"h": H, "two": 2}), unpermuted),
}


@pytest.mark.parametrize("name", CASES)
def test_layouts(name: str) -> None:
    stored, (axes, split, sizes, known), formula = CASES[name]
    array = np.arange(np.prod(stored), dtype=np.float32).reshape(stored)
    for part, want in enumerate(formula(array)):
        transform = made(axes, split, sizes, part, **known)
        got = transform.apply(array)
        np.testing.assert_array_equal(got, want)
        assert transform.shape(stored) == want.shape


@pytest.mark.parametrize(
    "name",
    [n for n, (stored, _, _) in CASES.items() if len(stored) == 2 and "transposed" not in n and "experts" not in n],
)
def test_a_bias_is_the_same_without_its_last_axis(name: str) -> None:
    """For a bias of ones' place: each output row of the matrix, stored as a column of equal numbers."""
    stored, (axes, split, sizes, known), formula = CASES[name]
    transposed = axes.startswith("in ")
    n = stored[1] if transposed else stored[0]
    bias = np.arange(n, dtype=np.float32)
    matrix = np.broadcast_to(bias, (stored[0], n)) if transposed else np.broadcast_to(bias[:, None], stored)
    for part, want in enumerate(formula(np.ascontiguousarray(matrix))):
        got = made(axes, split, sizes, part, **known).drop_trailing().apply(bias)
        np.testing.assert_array_equal(got.reshape(want[..., 0].shape), want[..., 0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w + 1", lambda w: w + 1),
        ("1 - w", lambda w: 1 - w),
        ("-exp(w)", lambda w: -np.exp(w)),
        ("log(abs(w)) / 2", lambda w: np.log(np.abs(w)) / 2),
        ("sqrt(abs(w))", lambda w: np.sqrt(np.abs(w))),
        ("softplus(w)", lambda w: np.log1p(np.exp(w))),
        ("w / norm(w)", lambda w: w / np.linalg.norm(w, axis=-1, keepdims=True)),
        ("w * scale if scale > 1 else w", lambda w: w * 3),
    ],
)
def test_values(text: str, expected: Callable[[np.ndarray], np.ndarray]) -> None:
    w = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    got = map_values(text, w, DictScope({"scale": 3}), WHERE)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected(w), rtol=1e-6)


NO_VALUES = [
    "3",
    "norm(w)",
    "w ** 2",
    "w // 2",
    "w + None",
    "w + 'a'",
    "sum(w)",
    "v",
    "w.shape",
    "w[0]",
    "w < 1",
    "not w",
    "[w]",
]
NO_VALUES += ["w and 1", "exp(w, w)", "w if w else 1", "len(w)", "'a' in w", "-'a' * w", "has(w)"]


@pytest.mark.parametrize("text", NO_VALUES)
def test_values_that_are_none(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        map_values(text, np.ones((2, 2), np.float32), DictScope({}), WHERE)
    assert caught.value.where.startswith("s.toml:2:")
    assert caught.value.fix


@pytest.mark.parametrize(
    "text", ["", "->", "a ->", "a b -> a", "a a", "(a", "a)", "((a) b)", "a, b", "a -> b", "1 2", "a -> a -> a"]
)
def test_axes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_axes(text, WHERE)
    assert caught.value.where == "s.toml:2:3"
    assert caught.value.fix


@pytest.mark.parametrize(
    ("axes", "shape", "known", "says"),
    [
        ("a b", (2, 2, 2), {}, "describe 2 dimensions"),
        ("(a b) c", (4, 2), {}, "axes a, b have no size"),
        ("(a b) c", (4, 2), {"a": 3}, "does not fit the stored size 4"),
        ("(a b) c", (4, 2), {"a": 2, "b": 3}, "does not fit the stored size 4"),
        ("a b", (4, 2), {"a": 3}, "does not fit the stored size 4"),
    ],
)
def test_shapes_that_do_not_fit(axes: str, shape: tuple[int, ...], known: dict[str, int], says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        made(axes, **known).shape(shape)
    assert caught.value.fix
