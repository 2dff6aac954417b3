"""From a fused graph to the flat program that the native library runs: operations, views, constants, memory.

`compile_program` writes every node as operations of ``kernels/cpu/abi.h``. What a node computes is not decided here; where its
inputs and outputs lie is. Nodes without a row per token are computed once, when the program is made.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import UnsupportedError
from ..graph.axes import alignment
from ..graph.fuse import Part, fuse
from ..graph.graph import Graph, Node
from ..kernels import native
from ..kernels.reference import alibi_slopes
from .constants import Matrices, Parameters, Rope
from .layout import Arena, View, row_major

__all__ = ["Caches", "Program", "compile_program"]


class Caches(Protocol):
    """What a node keeps of each sequence, at addresses that do not change (`inferflow.runtime.native.NativeCache`)."""

    def attention(self, node: Node) -> native.Cache: ...
    def state(self, node: Node) -> np.ndarray: ...


@dataclass
class Program:
    """`ops` run in order, each step; `views` are the values that outlive it (the output and what was to be kept)."""

    ops: Any
    count: int
    names: list[str]  # of each operation, for profiles
    arenas: tuple[Arena, Arena]  # rows: tokens, wanted logits
    places: list[tuple[int, int]]  # buffer -> (arena, its number there)
    views: dict[int, View]
    ropes: list[Rope]
    owned: list[Any]  # what the structs point at


def compile_program(graph: Graph, weights: Parameters, caches: Caches, keep: Collection[int] = ()) -> Program:
    """The program of `graph`; values in `keep` can be read after a step."""
    compiler = _Compiler(graph, weights, caches, keep)
    return compiler.program()


class _Compiler:
    def __init__(self, graph: Graph, weights: Parameters, caches: Caches, keep: Collection[int]) -> None:
        self.weights = weights
        self.caches = caches
        self.keep = frozenset({graph.output, *keep})
        self.owned: list[Any] = []
        self.matrices = Matrices(weights, self.owned)
        self.graph = fuse(graph, self.matrices.layout, keep)
        self.views: dict[int, View] = {}
        self.arenas = (Arena(), Arena())
        self.places: list[tuple[int, int]] = []
        self.ops: list[tuple[str, Structure, str]] = []
        self.setup: list[tuple[str, Structure, str]] = []  # run once, now
        self.ropes: dict[str, tuple[Rope, View]] = {}
        self.scope = ""
        last = {v: n for n, node in enumerate(self.graph.nodes) for v in node.inputs}
        self.last_use = [[v for v, at in last.items() if at == n] for n in range(len(self.graph.nodes))]
        self.read = {v for node in self.graph.nodes for v in node.inputs}
        self.uses: dict[int, int] = {}  # buffer -> values that still need it

    def program(self) -> Program:
        self.positions()
        for n, node in enumerate(self.graph.nodes):
            self.scope = node.scope
            getattr(self, f"do_{node.op}")(node)
            self.release(n, node)
        self.run_setup()
        ops = [native.Op(native.OPCODES.index(name), 0, ctypes.addressof(args)) for name, args, _ in self.ops]
        views = {v: self.views[v] for v in self.keep if v in self.views}
        names = [f"{scope}:{name}" for name, _, scope in self.ops]
        self.owned += [args for _, args, _ in self.ops]
        ropes = [rope for rope, _ in self.ropes.values()]
        return Program(
            native.array(native.Op, ops), len(ops), names, self.arenas, self.places, views, ropes, self.owned
        )

    def run_setup(self) -> None:
        """Values that are the same for all tokens."""
        ops = [native.Op(native.OPCODES.index(name), 0, ctypes.addressof(args)) for name, args, _ in self.setup]
        isa = native.isas()[native.isa_name()]
        native.run(native.Pool(1), isa, native.array(native.Op, ops), len(ops), native.Step())

    # ------------------------------------------------------------------ values

    def sizes(self, value: int) -> tuple[tuple[int, ...], int]:
        """(the axes beside the leading one, what the leading one counts)."""
        shape = self.graph.values[value].shape
        leading = native.NONE
        if shape and shape[0].size is None:
            leading = native.ROWS if shape[0].name == "rows" else native.TOKENS
            shape = shape[1:]
        return tuple(axis.size or 0 for axis in shape), leading

    def buffer(self, words: int, leading: int) -> int:
        self.places.append((leading, self.arenas[leading].take(words)))
        self.uses[len(self.places) - 1] = 0
        return len(self.places) - 1

    def place(self, sizes: tuple[int, ...], leading: int, words: int = 0) -> View:
        """A new contiguous value; `words` is its size where it does not hold floats."""
        words = words or math.prod(sizes)
        if leading == native.NONE:
            return self.constant(np.zeros(sizes, np.float32))
        number = self.buffer(words, leading)
        arena, own = self.places[number]
        return View(sizes, row_major(sizes), leading, number, 0, self.arenas[arena].words[own])

    def constant(self, array: np.ndarray) -> View:
        array = np.ascontiguousarray(array, np.float32)
        self.owned.append(array)
        return View(array.shape, row_major(array.shape), native.NONE, data=array)

    def new(self, value: int, words: int = 0) -> View:
        sizes, leading = self.sizes(value)
        self.set(value, self.place(sizes, leading, words))
        return self.views[value]

    def set(self, value: int, view: View) -> None:
        self.views[value] = view
        if view.buffer >= 0:
            self.uses[view.buffer] += 1

    def release(self, n: int, node: Node) -> None:
        """Buffers whose last reader was node `n` are free for the next."""
        for v in {*self.last_use[n], *(v for v in node.outputs if v not in self.read)}:
            view = self.views.get(v)
            if v in self.keep or view is None or view.buffer < 0:
                continue
            self.uses[view.buffer] -= 1
            if self.uses[view.buffer] == 0:
                arena, own = self.places[view.buffer]
                self.arenas[arena].give(own)

    def emit(self, name: str, args: Structure, *outs: View) -> None:
        once = all(out.leading == native.NONE for out in outs) and bool(outs)
        (self.setup if once else self.ops).append((name, args, self.scope))
        if once:
            self.owned.append(args)

    def array(self, kind: type[Structure], items: Sequence[Structure]) -> Any:
        made = native.array(kind, items)
        self.owned.append(made)
        return made

    def weight(self, node: Node, slot: str) -> int | None:
        """Address of a float weight."""
        for weight in node.weights:
            if weight.slot == slot:
                return self.matrices.floats(self.weights.array(weight.key))
        return None

    def do_embed(self, node: Node) -> None:
        source, out = node.inputs[0], self.new(node.outputs[0])
        inputs = self.graph.inputs
        kind = 0 if source == inputs["tokens"] else 1 if source == inputs["positions"] else 2
        ids = out if kind < 2 else self.views[source]
        table = self.array(native.Matrix, [self.matrices.matrix(node.weights[0])])
        self.emit("embed", native.EmbedArgs(ids.struct(), out.struct(), table, kind, node.params["offset"]), out)

    def do_quantise(self, node: Node) -> None:
        source = self.views[node.inputs[0]]
        cols = source.sizes[-1]
        group = node.params["group"]
        padded = -(-cols // group) * group
        words = (padded + 8 * (padded // group)) // 4
        words = -(-words // 16) * 16
        lead = source.sizes[:-1]
        sizes = (*lead, words)
        made = self.place(sizes, source.leading)
        self.set(node.outputs[0], made)
        for index in np.ndindex(*lead):
            x, out = source.at(index), made.at(index)
            args = native.QuantiseArgs(x.struct(), out.struct(), cols, padded, group, node.params["rotation"])
            self.emit("quantise", args)

    def quantiser(self, node: Node, source: View) -> tuple[Any, View]:
        """The quantised output of a norm, a gate or a glu, and the place of it. `source`: what would be quantised."""
        cols, group = source.sizes[-1], node.params["group"]
        padded = -(-cols // group) * group
        words = -(-((padded + 8 * (padded // group)) // 4) // 16) * 16
        out = self.place((words,), source.leading)
        self.set(node.outputs[0], out)
        args = native.QuantiseArgs(source.struct(), out.struct(), cols, padded, group, node.params["rotation"])
        return ctypes.pointer(args), out

    def do_linears(self, node: Node) -> None:
        parts: Sequence[Part] = node.params["parts"]
        x = self.views[node.inputs[0]]
        outs = [self.new(v) for v in node.outputs]
        residuals = [self.views[node.inputs[p.residual]] if p.residual else None for p in parts]
        matrices = self.array(native.Matrix, [self.matrices.matrix(p.weight, p.bias) for p in parts])
        none = View((), (), native.NONE).struct()
        for index in np.ndindex(*x.sizes[:-1]):
            args = native.LinearArgs(
                x.at(index).struct(),
                len(parts),
                matrices,
                self.array(native.Tensor, [out.at(index).struct() for out in outs]),
                self.array(native.Tensor, [none if r is None else r.at(index).struct() for r in residuals]),
            )
            self.emit("linear", args, *outs)

    def do_linear(self, node: Node) -> None:
        """Experts: the others have become `linears`."""
        x, ids = (self.views[v] for v in node.inputs)
        out = self.new(node.outputs[0])
        slots = {w.slot: w for w in node.weights}
        matrix = self.array(native.Matrix, [self.matrices.matrix(slots["weight"], slots.get("bias"))])
        per_choice = len(self.graph.values[node.inputs[0]].shape) > 2
        args = native.ExpertsArgs(x.struct(), ids.struct(), out.struct(), matrix, ids.sizes[-1], per_choice)
        self.emit("experts", args, out)

    # ------------------------------------------------------------------ constants and shapes

    def do_param(self, node: Node) -> None:
        view = self.constant(self.weights.array(node.weights[0].key))
        sizes, _ = self.sizes(node.outputs[0])
        self.set(node.outputs[0], View(sizes, row_major(sizes), native.NONE, data=view.data))

    def do_range(self, node: Node) -> None:
        self.set(node.outputs[0], self.constant(np.arange(node.params["n"], dtype=np.float32)))

    def positions(self) -> None:
        """Positions and ids as floats, where something computes with them."""
        for name, value in self.graph.inputs.items():
            readers = [node for node in self.graph.nodes if value in node.inputs]
            if any(node.op not in ("rope", "sdpa", "embed") for node in readers):
                if name != "positions":
                    raise UnsupportedError(
                        "the spec computes with token ids", where="spec", fix="use engine='reference'"
                    )
                self.emit("positions", native.PositionsArgs(self.new(value).struct()), self.views[value])
            else:
                self.views[value] = View((), (), native.TOKENS)

    def do_heads(self, node: Node) -> None:
        self.set(node.outputs[0], self.views[node.inputs[0]].heads(node.params["n"]))

    def do_merge(self, node: Node) -> None:
        x = self.views[node.inputs[0]]
        merged = x.merged()
        if merged is None:
            copy = self.place(x.sizes, x.leading)
            self.emit("copy", native.CopyArgs(x.struct(), copy.struct()), copy)
            merged = copy.merged()
        assert merged is not None
        self.set(node.outputs[0], merged)

    def do_split(self, node: Node) -> None:
        x, first = self.views[node.inputs[0]], 0
        for value, size in zip(node.outputs, node.params["sizes"], strict=True):
            self.set(value, x.part(first, size))
            first += size

    def broadcast(self, view: View, sizes: tuple[int, ...]) -> native.Tensor:
        """`view`, which has as many axes, over `sizes`."""
        strides = tuple(
            0 if own == 1 != size else s for own, size, s in zip(view.sizes, sizes, view.strides, strict=True)
        )
        return View(sizes, strides, view.leading, view.buffer, view.offset, view.stride, view.data).struct()

    def do_concat(self, node: Node) -> None:
        out = self.new(node.outputs[0])
        lead = out.sizes[:-1]
        views = [self.views[v] for v in node.inputs]
        parts = self.array(native.Tensor, [self.broadcast(v, (*lead, v.sizes[-1])) for v in views])
        self.emit("concat", native.ConcatArgs(out.struct(), len(views), parts), out)

    def do_outer(self, node: Node) -> None:
        a, b = (self.views[v] for v in node.inputs)
        out = self.new(node.outputs[0])
        self.emit("outer", native.OuterArgs(a.struct(), b.struct(), out.struct()), out)

    def do_select(self, node: Node) -> None:
        x, out = self.views[node.inputs[0]], self.new(node.outputs[0])
        self.emit("select", native.SelectArgs(x.struct(), out.struct()), out)

    # ------------------------------------------------------------------ element-wise

    def unary(self, node: Node, kind: str, a: float = 0.0) -> None:
        x, out = self.views[node.inputs[0]], self.new(node.outputs[0])
        self.emit("unary", native.UnaryArgs(x.struct(), out.struct(), native.UNARY.index(kind), a), out)

    def do_act(self, node: Node) -> None:
        self.unary(node, node.params["kind"])

    def do_clamp(self, node: Node) -> None:
        self.unary(node, "clamp", node.params["limit"])

    def do_softcap(self, node: Node) -> None:
        self.unary(node, "softcap", node.params["cap"])

    def do_xielu(self, node: Node) -> None:
        x, *alphas = (self.views[v] for v in node.inputs)
        if not alphas:
            alphas = [self.constant(np.asarray([node.params[name]], np.float32)) for name in ("alpha_p", "alpha_n")]
        out = self.new(node.outputs[0])
        tensors = (view.struct() for view in (x, *alphas, out))
        self.emit("xielu", native.XieluArgs(*tensors, node.params["beta"], node.params["eps"]), out)

    def do_binary(self, node: Node) -> None:
        out = self.new(node.outputs[0])
        if len(node.inputs) == 1:
            x = self.views[node.inputs[0]].struct()
            number = self.constant(np.asarray([node.params["number"]], np.float32))
            other = View(out.sizes, (0,) * len(out.sizes), native.NONE, data=number.data).struct()
            a, b = (other, x) if node.params["swap"] else (x, other)
        else:
            a, b = (self.aligned(v, node.outputs[0]) for v in node.inputs)
        self.emit("binary", native.BinaryArgs(a, b, out.struct(), native.BINARY.index(node.params["kind"])), out)

    def aligned(self, value: int, out: int) -> native.Tensor:
        """`value` with the axes of `out`: by name where that works, else from the right."""
        shape, large = self.graph.values[value].shape, self.graph.values[out].shape
        view = self.views[value]
        sizes, _ = self.sizes(out)
        at = alignment(shape, large) or ()
        lead = len(large) - len(sizes)
        own_lead = len(shape) - len(view.sizes)
        strides = [0] * len(sizes)
        for n, place in enumerate(at[own_lead:]):
            if view.sizes[n] == sizes[place - lead]:
                strides[place - lead] = view.strides[n]
        made = View(sizes, tuple(strides), view.leading, view.buffer, view.offset, view.stride, view.data)
        return made.struct()

    def do_reduce(self, node: Node) -> None:
        x, out = self.views[node.inputs[0]], self.new(node.outputs[0])
        self.emit("reduce", native.ReduceArgs(x.struct(), out.struct(), native.REDUCE.index(node.params["kind"])), out)

    def do_norm(self, node: Node) -> None:
        p, x = node.params, self.views[node.inputs[0]]
        weight, bias = self.weight(node, "weight"), self.weight(node, "bias")
        if weight is not None and p["add_one"]:
            key = next(w.key for w in node.weights if w.slot == "weight")
            weight = self.matrices.floats(1 + self.weights.array(key))
        quantise, out = self.quantiser(node, x) if "group" in p else (None, self.new(node.outputs[0]))
        kind = native.NORMS.index(p["kind"])
        args = native.NormArgs(x.struct(), out.struct(), weight, bias, quantise, kind, p["per_head"], p["eps"])
        self.emit("norm", args, out)

    def do_gate(self, node: Node) -> None:
        a, b = (self.views[v] for v in node.inputs)
        quantise, out = self.quantiser(node, a) if "group" in node.params else (None, self.new(node.outputs[0]))
        args = native.GateArgs(a.struct(), b.struct(), out.struct(), quantise, native.UNARY.index(node.params["kind"]))
        self.emit("gate", args, out)

    def do_glu(self, node: Node) -> None:
        x = self.views[node.inputs[0]]
        parts: Sequence[Part] = node.params["parts"]
        matrices = self.array(native.Matrix, [self.matrices.matrix(p.weight, p.bias) for p in parts])
        sizes, leading = self.sizes(node.outputs[0])
        quantise, out = self.quantiser(node, View(sizes, row_major(sizes), leading))
        args = native.GluArgs(x.struct(), matrices, quantise, native.UNARY.index(node.params["kind"]))
        self.emit("glu", args, out)

    # ------------------------------------------------------------------ positions, attention, state, experts

    def do_rope(self, node: Node) -> None:
        x = self.views[node.inputs[0]]
        rope, table = self.rope_table(node.params, x)
        out = self.new(node.outputs[0])
        half = rope.args.half
        pairing = ("half", "inter").index(node.params["pairing"])
        self.emit("rope", native.RopeArgs(x.struct(), table.struct(), out.struct(), half, pairing), out)

    def rope_table(self, params: Mapping[str, Any], x: View) -> tuple[Rope, View]:
        key = repr(sorted((name, value) for name, value in params.items() if name != "pairing"))
        if key not in self.ropes:
            if x.leading != native.TOKENS:
                raise UnsupportedError("rope on what is no token's own", where="spec", fix="use engine='reference'")
            rope = Rope(params)
            table = self.place((2 * rope.half,), native.TOKENS)
            rope.args.out = table.struct()
            self.ropes[key] = rope, table  # never released: all layers use it
            self.emit("rope_table", rope.args, table)
        return self.ropes[key]

    def do_sdpa(self, node: Node) -> None:
        p = node.params
        q, k, v = (self.views[i] for i in node.inputs[:3])
        cache = self.caches.attention(node)
        self.emit("store_kv", native.StoreKvArgs(k.struct(), v.struct(), ctypes.pointer(cache)))
        sinks = self.views[node.inputs[4]].data if len(node.inputs) > 4 else None
        slopes = None if p["alibi"] is None else alibi_slopes(q.sizes[0], p["alibi"])
        args = native.SdpaArgs(
            q.struct(), self.new(node.outputs[0]).struct(), ctypes.pointer(cache),
            None if sinks is None else sinks.ctypes.data, None if slopes is None else self.matrices.floats(slopes),
            p["window"] or 0, p["chunk"] or 0, p["alibi_dtype"] == "bfloat16", p["scale"], p["softcap"] or 0.0,
            p["alibi_scale"],
        )  # fmt: skip
        self.emit("sdpa", args)

    def do_conv(self, node: Node) -> None:
        x, out = self.views[node.inputs[0]], self.new(node.outputs[0])
        state = self.caches.state(node)
        weight, bias = self.weight(node, "weight"), self.weight(node, "bias")
        kernel = node.params["kernel"]
        self.emit("conv", native.ConvArgs(x.struct(), out.struct(), weight, bias, state.ctypes.data, kernel))

    def do_recurrence(self, node: Node) -> None:
        views = [self.views[v] for v in node.inputs]
        q, k, v, decay = views[:4]
        beta = views[4] if len(views) > 4 else View((), (), native.NONE)
        out = self.new(node.outputs[0])
        state = self.caches.state(node)
        tensors = (view.struct() for view in (q, k, v, decay, beta, out))
        sizes = (v.sizes[0], k.sizes[0], k.sizes[1], v.sizes[1], len(decay.sizes) > 1)
        self.emit("recurrence", native.RecurrenceArgs(*tensors, state.ctypes.data, *sizes))

    def do_router(self, node: Node) -> None:
        p = node.params
        logits = self.views[node.inputs[0]]
        bias = self.views[node.inputs[1]] if len(node.inputs) > 1 else View((), (), native.NONE)
        ids, weights = (self.new(v) for v in node.outputs)
        args = native.RouterArgs(
            logits.struct(), bias.struct(), ids.struct(), weights.struct(), logits.sizes[-1], p["top_k"],
            native.SCORES.index(p["score"]), p["normalise"], p["groups"] or 0, p["top_groups"] or 0,
            p["group_score"] == "top2_sum", p["norm_min"], p["scale"], p["jitter"],
        )  # fmt: skip
        self.emit("router", args)

    def do_combine(self, node: Node) -> None:
        y, out = self.views[node.inputs[0]], self.new(node.outputs[0])
        weights = self.views[node.inputs[1]] if len(node.inputs) > 1 else View((), (), native.NONE)
        self.emit("combine", native.CombineArgs(y.struct(), weights.struct(), out.struct()), out)
