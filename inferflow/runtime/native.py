"""The native engine: one call a step for the whole ragged batch, and the caches it keeps.

The first step compiles the graph for its cache; `capture` compiles a program of its own, in which the wanted tensors survive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, UnsupportedError, did_you_mean
from ..graph.graph import Graph, Node
from ..kernels import native
from .batch import StepBatch
from .constants import Parameters
from .kv_cache import state_shape
from .program import Program, compile_program

__all__ = ["BLOCK_SIZE", "KV_TYPES", "NativeCache", "NativeExecutor", "cache_type"]

BLOCK_SIZE = 64  # positions: four vectors of scores side by side; a multiple of 16, which the kernels need
KV_TYPES = native.CACHE_TYPES
MAX_SEQUENCES = 1024  # that have a state
DTYPES: Mapping[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "int8": np.int8}


class NativeCache:
    """Keys, values and states. Keys are [blocks, heads, dim, block_size], values [blocks, heads, block_size, dim] of `kind`;
    int8 has a float32 scale for each head and position. Pages are used as they are written.

    Raises UnsupportedError where there is no memory for that.
    """

    def __init__(self, graph: Graph, blocks: int, kind: str) -> None:
        self.kind = kind
        self.sequences = min(blocks, MAX_SEQUENCES)
        self.block_size = BLOCK_SIZE
        self.arrays: list[np.ndarray] = []
        self.attentions: dict[int, native.Cache] = {}  # by the output of the node
        self.states: dict[int, np.ndarray] = {}
        try:
            for n in graph.caches:
                self._make(graph, graph.nodes[n], blocks)
        except (MemoryError, ValueError):
            reason = f"there is no memory for a KV cache of {blocks * BLOCK_SIZE} positions"
            raise UnsupportedError(reason, where="max_model_len", fix="lower max_model_len, or use kv='int8'") from None

    def _make(self, graph: Graph, node: Node, blocks: int) -> None:
        if node.op != "sdpa":
            self.states[node.outputs[0]] = np.zeros((self.sequences, *state_shape(graph, node)), np.float32)
            return
        shapes = [graph.values[v].shape for v in node.inputs]
        heads, dim, vdim = (int(axis.size or 0) for axis in (shapes[1][1], shapes[1][2], shapes[2][2]))
        sizes = [(blocks, heads, dim, BLOCK_SIZE), (blocks, heads, BLOCK_SIZE, vdim)]
        arrays = [np.zeros(size, DTYPES[self.kind]) for size in sizes]
        if self.kind == "int8":
            arrays += [np.zeros((blocks, heads, BLOCK_SIZE), np.float32) for _ in range(2)]
        self.arrays += arrays
        pointers = [a.ctypes.data for a in arrays] + [None] * (4 - len(arrays))
        numbers = (KV_TYPES.index(self.kind), BLOCK_SIZE, heads, dim, vdim)
        self.attentions[node.outputs[0]] = native.Cache(*pointers, *numbers)

    def attention(self, node: Node) -> native.Cache:
        return self.attentions[node.outputs[0]]

    def state(self, node: Node) -> np.ndarray:
        return self.states[node.outputs[0]]


def cache_type(asked: str, graph: Graph, weights: Parameters) -> str:
    """The type of the cache; ``auto`` is float32 where a matrix is float32, so that nothing is rounded, else float16."""
    if asked == "auto":
        matrices = {w.key for node in graph.nodes if node.op == "linear" for w in node.weights if w.slot == "weight"}
        return "f32" if any(weights.stored(key).format == "f32" for key in matrices) else "f16"
    if asked not in KV_TYPES:
        fix = did_you_mean(asked, KV_TYPES) or f"use auto or one of {', '.join(KV_TYPES)}"
        raise ArgumentError(f"there is no cache type '{asked}'", where="kv", fix=fix)
    return asked


class NativeExecutor:
    """Runs `graph` on `threads` threads (None: what this process may use) with instruction set `isa` (None: the best).

    `kv` is the type of the cache. Raises UnsupportedError where the native library was not built.
    """

    block_size = BLOCK_SIZE

    def __init__(
        self, graph: Graph, weights: Parameters, *, threads: int | None = None, kv: str = "f16", isa: str | None = None
    ) -> None:
        self.graph = graph
        self.weights = weights
        self.kv = kv
        self.isa = native.isa_name(isa)
        self.pool = native.Pool(threads)
        self.programs: dict[frozenset[int], _Runner] = {}

    @property
    def block_bytes(self) -> int:
        return sum(a.nbytes for a in NativeCache(self.graph, 1, self.kv).arrays)

    def cache(self, blocks: int) -> NativeCache:
        """An empty cache, with the program that uses it. One executor has one cache at a time."""
        cache = NativeCache(self.graph, blocks, self.kv)
        self.programs = {frozenset(): _Runner(compile_program(self.graph, self.weights, cache), self)}
        return cache

    def run(self, batch: StepBatch, cache: NativeCache) -> np.ndarray:
        runner = self.programs[frozenset()]
        runner.step(batch)
        return runner.value(self.graph.output, batch)

    def capture(self, batch: StepBatch, cache: NativeCache, names: Sequence[str]) -> dict[str, np.ndarray]:
        ids = {name: self.graph.names[name] for name in names}
        wanted = frozenset(ids.values())
        if wanted not in self.programs:
            self.programs[wanted] = _Runner(compile_program(self.graph, self.weights, cache, wanted), self)
        runner = self.programs[wanted]
        runner.step(batch)
        given = {self.graph.inputs["tokens"]: batch.tokens, self.graph.inputs["positions"]: batch.positions}
        routed = {node.outputs[0] for node in self.graph.nodes if node.op == "router"}
        out = {}
        for name, v in ids.items():
            value = given[v] if v in given else runner.value(v, batch).copy()
            out[name] = value.view(np.int32).astype(np.int64) if v in routed else value
        return out


class _Inputs:
    """A step's numbers, in arrays that stay where they are from step to step, and the struct that points at them."""

    def __init__(self) -> None:
        self.struct = native.Step()
        self.spans = np.empty((0, 5), np.int64)
        self.table = np.empty(0, np.int32)
        self.ids = self.positions = self.rows = np.empty(0, np.int64)
        self.span_of = np.empty(0, np.int32)

    def fill(self, batch: StepBatch) -> None:
        tokens, rows = len(batch.tokens), len(batch.rows)
        numbers: list[tuple[int, int, int, int, int]] = []
        blocks: list[int] = []
        for span in batch.spans:
            numbers.append((span.start, span.count, span.past, len(blocks), span.slot))
            blocks += span.blocks
        self._reserve(max(tokens, rows), len(numbers), len(blocks))
        self.ids[:tokens] = batch.tokens
        self.positions[:tokens] = batch.positions
        self.rows[:rows] = batch.rows
        self.spans[: len(numbers)] = numbers
        self.table[: len(blocks)] = blocks
        if tokens == len(numbers):
            self.span_of[:tokens] = np.arange(tokens)
        else:
            self.span_of[:tokens] = np.repeat(np.arange(len(numbers)), self.spans[: len(numbers), 1])
        step = self.struct
        step.tokens, step.rows, step.span_count = tokens, rows, len(numbers)

    def _reserve(self, tokens: int, spans: int, blocks: int) -> None:
        """Room for so many; the struct follows arrays that move."""
        if tokens <= len(self.ids) and spans <= len(self.spans) and blocks <= len(self.table):
            return
        tokens, spans, blocks = (
            2 * max(tokens, len(self.ids)),
            2 * max(spans, len(self.spans)),
            2 * max(blocks, len(self.table)),
        )
        self.ids, self.positions, self.rows = (np.empty(tokens, np.int64) for _ in range(3))
        self.span_of, self.spans, self.table = (
            np.empty(tokens, np.int32), np.empty((spans, 5), np.int64), np.empty(blocks, np.int32),
        )  # fmt: skip
        names = ("ids", "positions", "row_index", "span_of", "spans", "block_table")
        arrays: tuple[np.ndarray, ...] = (self.ids, self.positions, self.rows, self.span_of, self.spans, self.table)
        for name, array in zip(names, arrays, strict=True):
            setattr(self.struct, name, array.ctypes.data)


class _Runner:
    """A program with its memory and inputs. `seconds`, where it is an array, has each operation's time added."""

    def __init__(self, program: Program, executor: NativeExecutor) -> None:
        self.program = program
        self.pool = executor.pool
        self.isa = native.isas()[executor.isa]
        self.inputs = _Inputs()
        self.buffers = np.zeros(len(program.places) + 1, np.uintp)
        self.inputs.struct.buffers = self.buffers.ctypes.data
        self.seconds: np.ndarray | None = None

    def step(self, batch: StepBatch) -> None:
        arenas = self.program.arenas
        if max(arenas[0].reserve(len(batch.tokens)), arenas[1].reserve(len(batch.rows))):
            addresses = [arena.addresses() for arena in arenas]
            self.buffers[: len(self.program.places)] = [addresses[a][n] for a, n in self.program.places]
        self.inputs.fill(batch)
        for rope in self.program.ropes:
            rope.prepare([span.length for span in batch.spans])
        native.run(self.pool, self.isa, self.program.ops, self.program.count, self.inputs.struct, self.seconds)

    def value(self, value: int, batch: StepBatch) -> np.ndarray:
        """A value that the program keeps, in its memory: the next step writes another there."""
        view = self.program.views[value]
        if view.data is not None:
            return view.data.reshape(view.sizes)
        arena, own = self.program.places[view.buffer]
        rows = len(batch.rows) if arena == native.ROWS else len(batch.tokens)
        memory = self.program.arenas[arena]
        start = memory.offsets[own] * memory.capacity
        seen = memory.memory[start : start + rows * view.stride].reshape(rows, view.stride)
        size = math.prod(view.sizes)
        if view.contiguous:
            return np.asarray(seen[:, view.offset : view.offset + size]).reshape(rows, *view.sizes)
        strides = [4 * s for s in (view.stride, *view.strides)]
        shape = (rows, *view.sizes)
        return np.asarray(np.lib.stride_tricks.as_strided(seen[:, view.offset :], shape, strides, writeable=False))
