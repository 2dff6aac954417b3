"""Calibrated quantising: the model runs over windows of a text, node by node, and each matrix is quantised when it is reached.

A matrix is quantised by the second moments of its inputs (`quant.quantise`'s Hessian). What comes before it is quantised
already, so these are the inputs it will see, rounded to 8 bits as the engine rounds them; and what comes after sees the
outputs it will give. All windows go through a node together; one matrix is held at a time, and values until their last use.

The windows go through the original model as well, so it is known how far the inputs, and what the output is added to, have
drifted from it. Before a matrix is quantised it takes up what a ridge regression on its inputs finds in that drift, as far as
what one half of the windows says of it holds for the other: the idea of GPTAQ (Li et al. 2025), in closed form and for the
residual stream too.

Of a mixture, each expert has its own moments, drawn towards those of all experts where few tokens chose it; the drift is
left to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quant import hadamard, quantise
from quant.formats import FORMATS, GROUP

from ..errors import CheckpointError
from ..graph.graph import Node
from ..kernels import reference as ref
from ..weights.choice import is_low_bit
from ..weights.stored import Stored, from_packed, joined, rotation_of
from .batch import Span, StepBatch
from .executor import ReferenceExecutor, single
from .model import Model

__all__ = ["Calibrator", "attend_all"]

Array = np.ndarray
SLAB = 1 << 24  # elements quantised at a time: each slab factorises the moments anew
RIDGE = np.float32(0.3)  # of the inputs' mean square


@dataclass
class _Inputs:
    """What goes into the matrices that share a value: `x` as they see it, in the original basis, its moments, and the same as
    the original model has it."""

    value: int
    layout: tuple[int, int]  # group and rotation
    x: Array
    hessian: Array | None
    original: Array


class Calibrator(ReferenceExecutor):
    """`windows`: int [count, length] of token ids. `rotation`: at most how wide the Hadamard blocks are."""

    def __init__(self, model: Model, windows: Array, rotation: int) -> None:
        super().__init__(model.graph, model.weights)
        self.rotation = rotation
        self.tokens = windows.size  # which see quantised matrices; as many after them see the originals
        count, length = 2 * len(windows), windows.shape[1]
        spans = tuple(Span(n * length, length, 0, (n,), length, n) for n in range(count))
        tokens = np.tile(windows.reshape(-1), 2).astype(np.int64)
        self.batch = StepBatch(tokens, np.tile(np.arange(length), count), spans, np.arange(len(tokens)))
        self.ops = {**self.ops, "sdpa": self.whole_windows}
        self.states = {}
        adds = [n for n in self.graph.nodes if n.op == "binary" and n.params["kind"] == "add" and len(n.inputs) == 2]
        self.added = {v: other for node in adds for v, other in (node.inputs, node.inputs[::-1])}

    def matrices(self, keys: list[str]) -> Iterator[tuple[str, Stored]]:
        """The matrices of `keys` as they are made, those of linears in the graph's order; then the others, uncalibrated."""
        self.wanted = {self.weights.ident(key): key for key in keys}
        self.made: dict[str, Stored] = {}
        self.inputs: _Inputs | None = None
        linears = [n for n, node in enumerate(self.graph.nodes) if node.op == "linear"]
        idents = [self.weights.ident(self.graph.nodes[n].weights[0].key) for n in linears]
        self.last_use = dict(zip(idents, linears, strict=True))
        gain = [n for n, ident in zip(linears, idents, strict=True) if self._gains(self.wanted.get(ident))]
        end = max(gain, default=-1)
        for _ in self._walk_to(end):
            for key in [key for key in self.made if self.last_use[self.weights.ident(key)] <= self.at]:
                yield key, self.made.pop(key)
                self.wanted.pop(self.weights.ident(key), None)
        for key in list(self.wanted.values()):
            yield key, self.weights.make(key, self.rotation)

    def _gains(self, key: str | None) -> bool:
        """Whether a matrix of that key is the better for calibration."""
        format_ = self.weights.formats[key] if key else ""
        return is_low_bit(format_) and FORMATS[format_].kind == "pair"

    def _walk_to(self, end: int) -> Iterator[None]:
        """The nodes up to `end`, whose output nobody needs."""
        inputs = self.graph.inputs
        values = self.values = {inputs["tokens"]: self.batch.tokens, inputs["positions"]: self.batch.positions}
        self.end = end
        for n, node in enumerate(self.graph.nodes[: end + 1]):
            self.at = n
            with np.errstate(all="ignore"):
                out = self.ops[node.op](node, *(values[v] for v in node.inputs))
            values.update(zip(node.outputs, out if isinstance(out, list | tuple) else (out,), strict=True))
            self.states.clear()
            for v in self.free_after.get(n, ()):
                del values[v]
            yield

    # ------------------------------------------------------------------ nodes

    def embed(self, node: Node, ids: Array) -> Array:
        """The rows as they are in the file: a table is often the output matrix too, which is quantised at the end."""
        return self.weights.rows(node.weights[0].key, ids + node.params["offset"])

    def linear(self, node: Node, x: Array, ids: Array | None = None) -> Array:
        key, bias = node.weights[0].key, self.weight(node, "bias")
        x = single(x)
        stored = self.matrix(node, key, x, ids)
        if self.at == self.end:
            return np.zeros(0, np.float32)
        inputs = self.seen(node, x, (stored.group, stored.rotation))
        if ids is None:
            pieces = [inputs.original @ w.T for w in self.weights.slabs(key, SLAB)]
            y = np.concatenate([inputs.x @ stored.widen().T, np.concatenate(pieces, -1)])
            return y if bias is None else y + bias
        seen = self.experts(inputs.x, ids[: self.tokens], stored.widen(), bias)
        original = self.experts(inputs.original, ids[self.tokens :], (w[0] for w in self.weights.slabs(key)), bias)
        return np.concatenate([seen, original])

    def experts(self, x: Array, ids: Array, matrices: Iterable[Array], bias: Array | None) -> Array:
        rows = self.graph.nodes[self.at].weights[0].sizes[-2]
        out = np.empty((*ids.shape, rows), np.float32)
        for e, w in enumerate(matrices):
            t, k = np.nonzero(ids == e)
            out[t, k] = _of(x, t, k) @ w.T
            if bias is not None:
                out[t, k] += bias[e]
        return out

    def whole_windows(self, node: Node, q: Array, k: Array, v: Array, _: Array, sinks: Array | None = None) -> Array:
        out = np.empty((*q.shape[:2], v.shape[-1]), np.float32)
        for span in self.batch.spans:
            rows = slice(span.start, span.start + span.count)
            out[rows] = attend_all(q[rows], k[rows], v[rows], sinks, node.params)
        return out

    # ------------------------------------------------------------------ matrices and their inputs

    def matrix(self, node: Node, key: str, x: Array, ids: Array | None) -> Stored:
        """The matrix of a linear: made before, or now."""
        own = self.wanted.get(self.weights.ident(key))
        format_ = self.weights.formats[key]
        if own is not None and own in self.made:
            return self.made[own]
        if not self._gains(key):
            stored = self.weights.make(key, self.rotation)
        else:
            rotation = rotation_of(format_, x.shape[-1], self.rotation)
            inputs = self.seen(node, x, (GROUP, rotation))
            try:
                stored = self.calibrated(key, format_, inputs, ids)
            except ValueError as error:
                raise self.unusable(key, error) from None
        if own is not None:
            self.made[own] = stored
        return stored

    def unusable(self, key: str, error: ValueError) -> CheckpointError:
        """Why a matrix cannot be calibrated: a weight up to here holds numbers that are not finite, or its inputs overflow."""
        weights = self.weights
        for before in dict.fromkeys(w.key for node in self.graph.nodes[: self.at + 1] for w in node.weights):
            if not np.isfinite(weights.read(before)).all():
                return weights.not_finite(before)
        where = f"{weights.source.path}: tensor '{weights.plans[key].names[0]}'"
        reason = f"cannot be calibrated, by what the model gives it to multiply on this text: {error}"
        return CheckpointError(reason, where=where, fix="check the model, or calibrate with another text")

    def seen(self, node: Node, x: Array, layout: tuple[int, int]) -> _Inputs:
        """The inputs of a matrix of this layout; shared with those before it that have the same."""
        value = node.inputs[0]
        if self.inputs is None or (self.inputs.value, self.inputs.layout) != (value, layout):
            self.inputs = None
            seen, original = x[: self.tokens], x[self.tokens :]
            rounded = ref.round_activations(seen, *layout) if layout[0] else seen
            self.inputs = _Inputs(value, layout, rounded, None, original)
        return self.inputs

    def calibrated(self, key: str, format_: str, inputs: _Inputs, ids: Array | None) -> Stored:
        rotation = inputs.layout[1]
        if ids is not None:
            return self.calibrated_experts(key, format_, inputs, ids)
        if inputs.hessian is None:
            inputs.hessian = moments(inputs.x.reshape(-1, inputs.x.shape[-1]), rotation)
        hessian = inputs.hessian if inputs.hessian.any() else None  # inputs that are all zero say nothing
        parts, first = [], 0
        for w in self.weights.slabs(key, SLAB):
            if hessian is not None:
                w = w + self.correction(w, inputs, first)
            parts.append(from_packed(quantise(w, format_, rotation=rotation, hessian=hessian)))
            first += len(w)
        return joined(parts, self.weights.plans[key].weight.sizes)

    def correction(self, w: Array, inputs: _Inputs, first: int) -> Array:
        """What rows `w` of a matrix, the first of them `first`, are to take up of the drift of their outputs."""
        x = inputs.x.reshape(-1, w.shape[1])
        drift = (inputs.original.reshape(x.shape) - x) @ w.T
        stream = self.values.get(self.added.get(self.graph.nodes[self.at].outputs[0], -1))
        if stream is not None and stream.shape[:-1] == (2 * len(drift),):
            drift += (stream[self.tokens :] - stream[: self.tokens])[:, first : first + len(w)]
        half = len(x) // 2
        shares = []
        for here, there in (slice(half), slice(half, None)), (slice(half, None), slice(half)):
            found = x[there] @ ridge(x[here], drift[here])
            shares.append(np.vdot(found, drift[there]) / max(np.vdot(found, found), np.float32(1e-30)))
        share = np.float32(np.clip(np.mean(shares), 0, 1))
        if not share > 0:  # NaN too: the matrix whose own inputs overflow will be named, not this one
            return np.zeros_like(w)
        return share * ridge(x, drift).T

    def calibrated_experts(self, key: str, format_: str, inputs: _Inputs, ids: Array) -> Stored:
        rotation, x, ids = inputs.layout[1], inputs.x, ids[: self.tokens]
        width = x.shape[-1]
        common = moments(x.reshape(-1, width), rotation)
        parts = []
        for e, matrix in enumerate(self.weights.slabs(key)):
            t, k = np.nonzero(ids == e)
            share = np.float32(len(t) / (len(t) + width))
            hessian = (1 - share) * common + share * moments(_of(x, t, k), rotation) if len(t) else common
            hessian = hessian if hessian.any() else None
            parts.append(from_packed(quantise(matrix, format_, rotation=rotation, hessian=hessian)))
        return joined(parts, self.weights.plans[key].weight.sizes)


def _of(x: Array, t: Array, k: Array) -> Array:
    """The inputs of tokens `t` as their choices `k` have them."""
    return x[t] if x.ndim == 2 else x[t, k]


def moments(x: Array, rotation: int) -> Array:
    """The mean of x xᵀ over the rows of x [n, in], padded and rotated: float32 [padded, padded]."""
    rotated = hadamard(np.pad(x, [(0, 0), (0, -x.shape[-1] % GROUP)]), rotation)
    return (rotated.T @ rotated) / np.float32(len(x))


def ridge(x: Array, y: Array) -> Array:
    """B [in, out] with the smallest |xB − y|² + r|B|², where r is RIDGE times the mean of the columns' squared lengths."""
    rows, cols = x.shape
    wide = rows < cols  # then by way of the smaller matrix: xᵀ(xxᵀ + r)⁻¹ = (xᵀx + r)⁻¹xᵀ
    gram = x @ x.T if wide else x.T @ x
    gram[np.diag_indices(len(gram))] += RIDGE * gram.trace() / np.float32(cols)
    return x.T @ np.linalg.solve(gram, y) if wide else np.linalg.solve(gram, x.T @ y)


def attend_all(q: Array, k: Array, v: Array, sinks: Array | None, params: Mapping[str, Any]) -> Array:
    """`reference.attend` for all tokens of a sequence at once: q [tokens, heads, dim], k, v [tokens, kv, …]."""
    tokens, heads = q.shape[:2]
    kv = k.shape[1]
    group = q.reshape(tokens, kv, -1, q.shape[-1]).transpose(1, 2, 0, 3)  # [kv, heads of one, tokens, dim]
    scores = group @ k.transpose(1, 2, 0)[:, None] * np.float32(params["scale"])
    if params["softcap"] is not None:
        cap = np.float32(params["softcap"])
        scores = cap * np.tanh(scores / cap)
    if params["alibi"] is not None:
        bias = ref.alibi_bias(heads, 0, tokens, params["alibi"], params["alibi_dtype"] == "bfloat16")
        scores += (bias * np.float32(params["alibi_scale"])).reshape(kv, -1, 1, tokens)
    at = np.arange(tokens)
    distance = at[:, None] - at
    hidden = distance < 0
    if params["window"] is not None:
        hidden |= distance >= params["window"]
    if params["chunk"] is not None:
        hidden |= at[:, None] // params["chunk"] != at // params["chunk"]
    scores = np.where(hidden, np.float32(-np.inf), scores)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks.reshape(kv, -1, 1, 1))
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.reshape(kv, -1, 1, 1) - top)
    out = (e / total) @ v.transpose(1, 0, 2)[:, None]
    return out.transpose(2, 0, 1, 3).reshape(tokens, heads, -1)
