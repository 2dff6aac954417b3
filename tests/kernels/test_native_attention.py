"""The native cache and attention against `reference.attend` over the cache as it was stored, under every instruction set.

Blocks that nobody has written, and the unwritten ends of those in use, hold NaN in every test: what reads them shows.
"""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from inferflow.kernels import native
from inferflow.kernels import reference as ref

from .native_ops import ISAS, Array, Steps, hostile, padded, run, tensor

TYPES = native.CACHE_TYPES
STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "int8": np.int8}
BLOCKS = 48
PLAIN = {
    "scale": 0.125, "softcap": None, "alibi": None, "alibi_dtype": "float32", "alibi_scale": 1.0, "window": None, "chunk": None,
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "chunk": {"chunk": 24},
    "softcap": {"softcap": 2.5},
    "alibi": {"alibi": 8.0},
    "alibi in bfloat16": {"alibi": 8.0, "alibi_dtype": "bfloat16", "alibi_scale": 0.5},
    "window and sinks": {"window": 7, "sinks": True},
    "sinks": {"sinks": True},
}


class Shape(NamedTuple):
    heads: int
    kv: int
    dim: int
    vdim: int


SHAPES = (
    Shape(9, 3, 64, 64), Shape(14, 2, 64, 64), Shape(4, 4, 37, 19), Shape(1, 1, 1, 1), Shape(5, 1, 192, 128),
    Shape(100, 1, 40, 33),
)  # fmt: skip


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def same_bits(a: Array, b: Array) -> bool:
    return a.tobytes() == b.tobytes()


def bfloat16(x: Array) -> Array:
    return ref._bfloat16(np.ascontiguousarray(x)).view(np.uint32) >> 16


class Cache:
    """A node's cache, all NaN, and the tables of sequences of `lengths` tokens, which take its blocks in no order."""

    def __init__(self, shape: Shape, kind: str, block: int, lengths: Sequence[int], blocks: int = BLOCKS) -> None:
        self.kind, self.block = kind, block
        blank = {"bf16": 0x7FC0, "int8": 1}.get(kind, np.nan)
        self.keys = np.full((blocks, shape.kv, shape.dim, block), blank, STORED[kind])
        self.values = np.full((blocks, shape.kv, block, shape.vdim), blank, STORED[kind])
        self.scales = np.full((2, blocks, shape.kv, block), np.nan, np.float32)
        pointers = [a.ctypes.data for a in (self.keys, self.values, *self.scales)]
        self.struct = native.Cache(*pointers, TYPES.index(kind), block, shape.kv, shape.dim, shape.vdim)
        order, self.tables = list(np.random.default_rng(5).permutation(blocks)), []
        for n in lengths:
            used = -(-n // block)
            self.tables.append(np.asarray(order[:used], np.int32))
            order = order[used:]

    @property
    def memory(self) -> list[Array]:
        return [self.keys.reshape(-1), self.values.reshape(-1), self.scales]

    def step(self, counts: Sequence[int], past: Sequence[int], which: Sequence[int]) -> Steps:
        step = Steps(counts, past)
        self.table = np.concatenate([self.tables[s] for s in which])
        step.struct.block_table = self.table.ctypes.data
        starts = np.cumsum([0, *(len(self.tables[s]) for s in which)])
        for n in range(len(which)):
            step.spans[n].blocks = starts[n]
        return step

    def widened(self, sequence: int) -> tuple[Array, Array]:
        """k [positions, kv, dim] and v [positions, kv, vdim] in float32."""
        at = self.tables[sequence]
        k, v = self.keys[at], self.values[at]
        if self.kind == "bf16":
            k, v = ((x.astype(np.uint32) << 16).view(np.float32) for x in (k, v))
        k, v = k.astype(np.float32), v.astype(np.float32)
        if self.kind == "int8":
            k, v = k * self.scales[0][at][:, :, None], v * self.scales[1][at][..., None]
        k, v = k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)
        return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])


class Case:
    """Sequences of random queries, keys and values, and what attention over them takes."""

    def __init__(self, shape: Shape, lengths: Sequence[int], feature: str = "plain") -> None:
        self.shape, self.lengths = shape, lengths
        self.params = {**PLAIN, **FEATURES[feature]}
        self.q = [normal(10 + n, length, shape.heads, shape.dim) for n, length in enumerate(lengths)]
        self.k = [normal(20 + n, length, shape.kv, shape.dim) for n, length in enumerate(lengths)]
        self.v = [normal(30 + n, length, shape.kv, shape.vdim) for n, length in enumerate(lengths)]
        self.sinks = normal(40, shape.heads) * 2 if self.params.get("sinks") else None
        self.slopes = ref.alibi_slopes(shape.heads, 8.0) if self.params["alibi"] else None

    def attend(
        self, isa: str, cache: Cache, parts: Sequence[tuple[int, int, int]], view: Any = np.array
    ) -> list[Array]:
        """One step of (sequence, first, last) for each part: stored, then attended. [tokens, heads, vdim] of each part."""
        q, k, v = (view(np.concatenate([x[s][a:b] for s, a, b in parts])) for x in (self.q, self.k, self.v))
        out = view(np.full((*q.shape[:2], self.shape.vdim), 7, np.float32))
        step = cache.step([b - a for _, a, b in parts], [a for _, a, _ in parts], [s for s, _, _ in parts])
        at = ctypes.pointer(cache.struct)
        run(isa, "store_kv", native.StoreKvArgs(tensor(k), tensor(v), at), step, cache.memory)
        p = self.params
        args = native.SdpaArgs(
            tensor(q), tensor(out), at, *(None if x is None else x.ctypes.data for x in (self.sinks, self.slopes)),
            p["window"] or 0, p["chunk"] or 0, p["alibi_dtype"] == "bfloat16", p["scale"], p["softcap"] or 0, p["alibi_scale"],
        )  # fmt: skip
        run(isa, "sdpa", args, step, [out])
        return np.split(np.ascontiguousarray(out), np.cumsum([b - a for _, a, b in parts])[:-1])

    def whole(self, isa: str, cache: Cache, view: Any = np.array) -> list[Array]:
        return self.attend(isa, cache, [(s, 0, n) for s, n in enumerate(self.lengths)], view)

    def expected(self, cache: Cache, sequence: int, tokens: Sequence[int]) -> Array:
        k, v = cache.widened(sequence)
        rows = []
        for t in tokens:
            first = max(0, t - self.params["window"] + 1) if self.params["window"] else 0
            first = max(first, t // self.params["chunk"] * self.params["chunk"]) if self.params["chunk"] else first
            seen = slice(first, t + 1)
            rows.append(ref.attend(self.q[sequence][t], k[seen], v[seen], first, self.sinks, self.params))
        return np.stack(rows)


# ------------------------------------------------------------------------------------------------ the cache


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_stored(isa: str, kind: str) -> None:
    """Bit for bit, the edges of float32 among them, and nothing beside the positions of the step."""
    shape, lengths, block = Shape(6, 3, 37, 19), [40, 5], 16
    case, cache = Case(shape, lengths), Cache(shape, kind, block, lengths)
    case.k[0], case.v[0] = (hostile(np.random.default_rng(n), x[0].shape) for n, x in enumerate((case.k, case.v)))
    case.k[0][3], case.v[0][4], case.k[0][5], case.v[0][6] = 0, 0, 1e-40, np.linspace(65500, 65540, 19)
    before = [cache.keys.copy(), cache.values.copy(), cache.scales.copy()]
    with np.errstate(all="ignore"):
        case.attend(isa, cache, [(0, 7, 40), (1, 0, 3)])
        for sequence, first, last in ((0, 7, 40), (1, 0, 3)):
            for position in range(first, last):
                at, n = cache.tables[sequence][position // block], position % block
                for x, stored, rows, scales in (
                    (case.k, before[0], cache.keys[at, :, :, n], before[2][0]),
                    (case.v, before[1], cache.values[at, :, n], before[2][1]),
                ):
                    want, scale = narrowed(x[sequence][position], kind)
                    assert same(rows, want, kind), (position, rows, want)
                    index = (at, slice(None), slice(None), n) if stored is before[0] else (at, slice(None), n)
                    stored[index] = rows
                    scales[at, :, n] = scale if scale is not None else scales[at, :, n]
    assert same_bits(before[0], cache.keys)
    assert same_bits(before[1], cache.values)
    np.testing.assert_array_equal(before[2], cache.scales)


def narrowed(x: Array, kind: str) -> tuple[Array, Array | None]:
    """Rows [heads, channels] as the cache has them, and the scales [heads] of int8."""
    if kind == "bf16":
        return np.where(np.isnan(x), 0x7FC0, bfloat16(x)).astype(np.uint16), None
    if kind != "int8":
        return x.astype(STORED[kind]), None
    m = np.abs(x).max(-1)
    inverse = np.float32(127) / m
    good = np.isfinite(m) & np.isfinite(inverse)
    codes = np.rint(np.where(good[:, None], x * inverse[:, None], 0)).astype(np.int8)
    return codes, np.where(good, m / np.float32(127), np.where(np.isfinite(m), np.float32(0), np.float32(np.nan)))


def same(stored: Array, want: Array, kind: str) -> bool:
    """Equal bits, but for those of NaN."""
    if kind == "int8":
        return bool((stored == want).all())
    if kind == "bf16":
        stored, want = ((x.astype(np.uint32) << 16).view(np.float32) for x in (stored, want))
    return bool(
        np.array_equal(stored, want, equal_nan=True) and (np.signbit(stored) == np.signbit(want))[want == 0].all()
    )


# ------------------------------------------------------------------------------------------------ attention


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_attention(isa: str, kind: str, shape: Shape) -> None:
    lengths = [75, 3, 40]
    for feature in FEATURES:
        for block in (16, 32, 64):
            case, cache = Case(shape, lengths, feature), Cache(shape, kind, block, lengths)
            for n, got in enumerate(case.whole(isa, cache)):
                np.testing.assert_allclose(
                    got, case.expected(cache, n, range(lengths[n])), rtol=0, atol=1e-5, err_msg=feature
                )


@pytest.mark.parametrize("kind", TYPES)
def test_strides(isa: str, kind: str) -> None:
    shape, lengths = Shape(6, 2, 20, 12), [33, 2]
    case = Case(shape, lengths)
    caches = [Cache(shape, kind, 16, lengths) for _ in range(2)]
    plain, apart = case.whole(isa, caches[0]), case.whole(isa, caches[1], padded)
    assert all(same_bits(a, b) for a, b in zip(plain, apart, strict=True))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", TYPES)
def test_a_token_has_the_same_bits_in_any_company(isa: str, kind: str, feature: str) -> None:
    """Whole prompts together; each alone; in random chunks that are shuffled together; and token by token."""
    for shape in (SHAPES[0], SHAPES[2], SHAPES[5]):
        lengths = [75, 3, 40]
        case = Case(shape, lengths, feature)
        together = case.whole(isa, Cache(shape, kind, 32, lengths))
        cache = Cache(shape, kind, 32, lengths)
        for n, length in enumerate(lengths):
            assert same_bits(case.attend(isa, cache, [(n, 0, length)])[0], together[n])
        rng, cache, done = np.random.default_rng(7), Cache(shape, kind, 32, lengths), [0, 0, 0]
        while done != lengths:
            left = [s for s in rng.permutation(3) if done[s] < lengths[s]]
            parts = [(s, done[s], min(lengths[s], done[s] + int(rng.choice([1, 7, 30])))) for s in left]
            for (s, a, b), got in zip(parts, case.attend(isa, cache, parts), strict=True):
                assert same_bits(got, together[s][a:b])
                done[s] = b
        for t in range(0, 75, 9):  # queries over the full cache: what follows a token does not matter
            assert same_bits(case.attend(isa, cache, [(0, t, t + 1)])[0][0], together[0][t])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("kind", TYPES)
def test_a_bad_token_harms_nobody_before_it_and_no_other_sequence(isa: str, kind: str, value: float) -> None:
    shape, lengths = SHAPES[0], [75, 40]
    for feature in ("plain", "window"):
        case = Case(shape, lengths, feature)
        good = case.whole(isa, Cache(shape, kind, 32, lengths))
        for x in (case.q, case.k, case.v):
            x[0][37, :, ::3] = value
        bad = case.whole(isa, Cache(shape, kind, 32, lengths))
        assert same_bits(bad[0][:37], good[0][:37])
        assert same_bits(bad[1], good[1])
        if feature == "window":
            assert same_bits(bad[0][57:], good[0][57:])
        if np.isnan(value):
            assert np.isnan(bad[0][37:57]).any(-1).all()


def test_scores_of_minus_infinity(isa: str) -> None:
    """Keys that can have no weight, in whole blocks too, have none; a query with no other keys gets NaN."""
    shape, lengths = Shape(2, 1, 8, 8), [70]
    case, cache = Case(shape, lengths), Cache(shape, "f32", 32, lengths)
    case.q[0][...] = np.abs(case.q[0]) + 1
    case.k[0][:35] = -np.inf
    with np.errstate(all="ignore"):
        got, want = case.whole(isa, cache)[0], case.expected(cache, 0, range(70))
    assert np.isnan(want[:35]).all()
    assert np.isfinite(want[35:]).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_great_scores(isa: str) -> None:
    """Weights that vanish beside others, and a running maximum that leaps."""
    shape, lengths = Shape(2, 1, 8, 8), [70]
    case, cache = Case(shape, lengths), Cache(shape, "f32", 16, lengths)
    case.k[0] *= np.linspace(1, 400, 70, dtype=np.float32)[:, None, None]
    np.testing.assert_allclose(case.whole(isa, cache)[0], case.expected(cache, 0, range(70)), rtol=0, atol=2e-4)


def long_context(isa: str) -> int:
    """Attends over 32,768 tokens, one and 512 at a time, and compares; how much the process's greatest size grew, in KiB."""
    shape, length = Shape(4, 1, 64, 64), 32768
    case, cache = Case(shape, [length]), Cache(shape, "f16", 32, [length], length // 32)
    case.attend(isa, cache, [(0, 0, 1)])
    for first in range(0, length - 512, 4096):  # the chunk's keys are stored with it
        last = min(first + 4096, length - 512)
        step = cache.step([last - first], [first], [0])
        k, v = (np.array(x[0][first:last]) for x in (case.k, case.v))
        run(isa, "store_kv", native.StoreKvArgs(tensor(k), tensor(v), ctypes.pointer(cache.struct)), step, [])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (chunk,) = case.attend(isa, cache, [(0, length - 512, length)])
    (token,) = case.attend(isa, cache, [(0, length - 1, length)])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert same_bits(chunk[-1], token[0])
    want = case.expected(cache, 0, [length - 512, length - 100, length - 1])
    np.testing.assert_allclose(chunk[[0, 412, 511]], want, rtol=0, atol=1e-5)
    return grown


def test_a_context_of_32k_takes_little_memory(isa: str) -> None:
    """In a process of its own. 512 queries have 268 MB of scores, if anything held them; the test copies the cache: 34 MB."""
    script = f"from tests.kernels.test_native_attention import long_context; print(long_context({isa!r}))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60 << 10
