"""Running a graph on a step batch: the interface every engine implements, and the NumPy reference engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..graph.axes import Shape, alignment
from ..graph.graph import Graph, Node
from ..kernels import reference as ref
from ..kernels.native import Pool
from ..kernels.recurrent import causal_conv, recurrence
from ..kernels.rope import frequencies, rope_length
from ..weights.loader import Weights
from .batch import StepBatch
from .kv_cache import KVCache, state_shape

__all__ = ["Cache", "Executor", "ReferenceExecutor"]

Array = np.ndarray


def single(x: Array) -> Array:
    """float32, which the positions are not."""
    return x.astype(np.float32, copy=False)


class Cache(Protocol):
    """What an executor keeps of sequences: keys and values in `arrays`, whose first axis counts blocks, and in `states` what
    the last token of each sequence leaves, whose first axis counts slots. `kind`: the type of keys and values, of
    `KV_TYPES`; `sequences`: how many slots there are."""

    kind: str
    sequences: int
    arrays: list[Array]
    states: dict[int, Array]


class Executor(Protocol):
    """Runs steps. Keys and values of the batch's tokens are in `cache` afterwards. `block_size`: positions of a block."""

    block_size: int

    @property
    def pool(self) -> Pool | None:
        """The threads it has, idle between steps."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's keys and values."""
        ...

    def cache(self, blocks: int) -> Any:
        """An empty Cache of so many blocks, of the kind that `run` takes. Raises UnsupportedError (no memory)."""
        ...

    def run(self, batch: StepBatch, cache: Any) -> Array:
        """Logits, float32 [rows, vocab]. They may be the executor's own memory, which the next step uses again."""
        ...

    def capture(self, batch: StepBatch, cache: Any, names: Sequence[str]) -> dict[str, Array]:
        """The named tensors of the same step."""
        ...


class ReferenceExecutor:
    """Node after node, each by its definition in `inferflow.kernels.reference`; values are dropped after their last use.

    With `int8_activations` the inputs of low-bit matrices are rounded as the native engine rounds them: its definition.
    """

    block_size = 16
    pool: Pool | None = None

    def __init__(self, graph: Graph, weights: Weights, int8_activations: bool = False) -> None:
        self.graph = graph
        self.weights = weights
        self.int8_activations = int8_activations
        self.rope_tables: dict[Any, tuple[Array, float]] = {}
        for node in graph.nodes:
            if node.op == "rope":
                frequencies(
                    node.params, 1
                )  # a scaling that cannot be computed is refused now, not in the midst of a step
        last = {v: n for n, node in enumerate(graph.nodes) for v in node.inputs}
        self.free_after: dict[int, list[int]] = {}
        for v, n in last.items():
            self.free_after.setdefault(n, []).append(v)
        self.ops: Mapping[str, Callable[..., Any]] = {
            "embed": self.embed,
            "linear": self.linear,
            "norm": lambda n, x: ref.norm(x, self.weight(n, "weight"), self.weight(n, "bias"), n.params),
            "param": lambda n: self.weight(n, "value"),
            "act": lambda n, x: ref.ACTIVATION[n.params["kind"]](single(x)),
            "xielu": self.xielu,
            "binary": self.binary,
            "clamp": lambda n, x: np.clip(single(x), -n.params["limit"], n.params["limit"]),
            "softcap": lambda n, x: np.float32(n.params["cap"]) * np.tanh(single(x) / np.float32(n.params["cap"])),
            "reduce": self.reduce,
            "heads": lambda n, x: x.reshape(*x.shape[:-1], n.params["n"], -1),
            "merge": lambda n, x: x.reshape(*x.shape[:-2], -1),
            "split": lambda n, x: np.split(x, np.cumsum(n.params["sizes"])[:-1], axis=-1),
            "concat": self.concat,
            "outer": lambda n, a, b: single(a)[..., :, None] * b[..., None, :],
            "range": lambda n: np.arange(n.params["n"], dtype=np.float32),
            "rope": self.rope,
            "sdpa": self.sdpa,
            "conv": self.conv,
            "recurrence": self.recurrence,
            "router": lambda n, x, bias=None: ref.router(x, bias, n.params),
            "combine": lambda n, y, w=None: (y if w is None else y * w[..., None]).sum(-2),
            "select": lambda n, x: x[self.batch.rows],
        }

    @property
    def block_bytes(self) -> int:
        return sum(a.nbytes for a in KVCache(self.graph, 1, self.block_size).arrays)

    def cache(self, blocks: int) -> KVCache:
        return KVCache(self.graph, blocks, self.block_size)

    def run(self, batch: StepBatch, cache: KVCache) -> Array:
        return self._walk(batch, cache, {self.graph.output})[self.graph.output]

    def capture(self, batch: StepBatch, cache: KVCache, names: Sequence[str]) -> dict[str, Array]:
        ids = {name: self.graph.names[name] for name in names}
        values = self._walk(batch, cache, set(ids.values()))
        return {name: np.array(values[v]) for name, v in ids.items()}

    def _walk(self, batch: StepBatch, cache: KVCache, keep: set[int]) -> dict[int, Array]:
        self.batch, self.kv = batch, cache
        self.states: dict[
            tuple[int, int], Array
        ] = {}  # of this step, by node and slot: the cache's own change at the end
        values = {self.graph.inputs["tokens"]: batch.tokens, self.graph.inputs["positions"]: batch.positions}
        with np.errstate(all="ignore"):  # the engine looks at the logits
            for n, node in enumerate(self.graph.nodes):
                self.at = n
                out = self.ops[node.op](node, *(values[v] for v in node.inputs))
                values.update(zip(node.outputs, out if isinstance(out, list | tuple) else (out,), strict=True))
                for v in self.free_after.get(n, ()):
                    if v not in keep:
                        del values[v]
        for (n, slot), state in self.states.items():
            cache.states[n][slot] = state
        return values

    # ------------------------------------------------------------------ what needs weights, shapes or the cache

    def weight(self, node: Node, slot: str) -> Array | None:
        for weight in node.weights:
            if weight.slot == slot:
                return self.weights.array(weight.key)
        return None

    def embed(self, node: Node, ids: Array) -> Array:
        table = self.weight(node, "weight")
        assert table is not None
        return table[ids + node.params["offset"]]

    def xielu(self, node: Node, x: Array, *alphas: Array) -> Array:
        p, n = alphas or (np.float32(node.params[name]) for name in ("alpha_p", "alpha_n"))
        return ref.xielu(single(x), np.asarray(p), np.asarray(n), node.params["beta"], node.params["eps"])

    def linear(self, node: Node, x: Array, ids: Array | None = None) -> Array:
        w, b = self.weight(node, "weight"), self.weight(node, "bias")
        assert w is not None
        if self.int8_activations:
            stored = self.weights.stored(node.weights[0].key)
            x = ref.round_activations(x, stored.group, stored.rotation) if stored.group else x
        return ref.linear(x, w, b) if ids is None else ref.expert_linear(x, ids, w, b)

    def shape(self, value: int) -> Shape:
        return self.graph.values[value].shape

    def binary(self, node: Node, a: Array, b: Array | None = None) -> Array:
        operation = ref.BINARY[node.params["kind"]]
        if b is None:
            number = np.float32(node.params["number"])
            a = single(a)
            return operation(number, a) if node.params["swap"] else operation(a, number)
        left, right = (self.shape(v) for v in node.inputs)
        if len(left) != len(right):
            small, large = (left, right) if len(left) < len(right) else (right, left)
            at = alignment(small, large) or ()
            full = [slice(None) if n in at else None for n in range(len(large))]
            a, b = (a[tuple(full)], b) if small is left else (a, b[tuple(full)])
        return operation(single(a), single(b))

    def reduce(self, node: Node, x: Array) -> Array:
        kind = node.params["kind"]
        return ref.softmax(x) if kind == "softmax" else getattr(np, kind)(x, axis=-1, keepdims=True)

    def concat(self, node: Node, *parts: Array) -> Array:
        lead = np.broadcast_shapes(*(p.shape[:-1] for p in parts))
        return np.concatenate([np.broadcast_to(p, (*lead, p.shape[-1])) for p in parts], axis=-1)

    def rope(self, node: Node, x: Array, positions: Array) -> Array:
        out = np.empty_like(x)
        for span in self.batch.spans:
            key = (id(node.params), rope_length(node.params, span.length))
            if key not in self.rope_tables:
                self.rope_tables[key] = frequencies(node.params, span.length)
            inverse, factor = self.rope_tables[key]
            inverse = -inverse if node.params["reverse"] else inverse
            rows = slice(span.start, span.start + span.count)
            out[rows] = ref.rotate(x[rows], positions[rows], inverse, factor, node.params["pairing"])
        return out

    def conv(self, node: Node, x: Array) -> Array:
        w, b = self.weight(node, "weight"), self.weight(node, "bias")
        assert w is not None
        return self.stateful(x, lambda rows, state: causal_conv(x[rows], w, b, state))

    def recurrence(self, node: Node, q: Array, k: Array, v: Array, decay: Array, beta: Array | None = None) -> Array:
        return self.stateful(
            v, lambda r, state: recurrence(q[r], k[r], v[r], decay[r], None if beta is None else beta[r], state)
        )

    def stateful(self, like: Array, function: Callable[[slice, Array], tuple[Array, Array]]) -> Array:
        """`function` over each sequence's rows, from the state that its last token left to the one it leaves now."""
        node = self.graph.nodes[self.at]
        shape = state_shape(self.graph, node)
        out = np.empty_like(like)
        for span in self.batch.spans:
            state = self.kv.states[self.at][span.slot] if span.past else np.zeros(shape, np.float32)
            rows = slice(span.start, span.start + span.count)
            out[rows], self.states[self.at, span.slot] = function(rows, state)
        return out

    def sdpa(self, node: Node, q: Array, k: Array, v: Array, positions: Array, sinks: Array | None = None) -> Array:
        keys, values = self.kv.keys[self.at], self.kv.values[self.at]
        size = self.kv.block_size
        out = np.empty((*q.shape[:2], v.shape[-1]), np.float32)
        window, chunk = node.params["window"], node.params["chunk"]
        for span in self.batch.spans:
            rows = slice(span.start, span.start + span.count)
            table = np.asarray(span.blocks)
            where = np.arange(span.past, span.past + span.count)
            keys[table[where // size], where % size] = k[rows]
            values[table[where // size], where % size] = v[rows]
            used = table[: -(-(span.past + span.count) // size)]
            all_k = keys[used].reshape(-1, *keys.shape[2:])
            all_v = values[used].reshape(-1, *values.shape[2:])
            for n, p in enumerate(where):
                first = 0 if window is None else max(0, p - window + 1)
                first = first if chunk is None else max(first, p // chunk * chunk)
                seen = slice(first, p + 1)
                out[span.start + n] = ref.attend(q[span.start + n], all_k[seen], all_v[seen], first, sinks, node.params)
        return out
