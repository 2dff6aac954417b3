"""Fusion: what can be done in one pass over memory becomes one node. Functions from Graph to Graph; no block's name is known.

Five operations that no flow can write appear in a fused graph:

``quantise``   x -> x as int8 rows, once for all matrices that multiply it. params: group, rotation.
``linears``    (x, residuals…) -> one output for each of params["parts"]: matrices with a common input, each with an optional
               bias, each added to its residual where it has one.
``gate``       (a, b) -> act(a) · b; params: kind. With group and rotation among its params the output is quantised.
``glu``        x -> act(A·x) · (B·x), quantised, for the two of params["parts"]; params: kind, group, rotation.
``norm``       with group and rotation among its params: the output is quantised.

Every fused node gives the bits that its parts give one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .axes import Shape
from .graph import Graph, Node, Value, Weight

__all__ = ["Layout", "Part", "fuse"]

Layout = tuple[int, int]  # (columns with a common activation scale, width of the rotation or 0)
LARGE = 256  # columns: fewer units than that gives are hard to share out evenly
LayoutOf = Callable[[Weight], Layout | None]  # None: the weight's numbers are floats


@dataclass(frozen=True)
class Part:
    """One matrix of a ``linears`` node. `residual` indexes the node's inputs; 0 for none."""

    weight: Weight
    bias: Weight | None
    residual: int = 0


def fuse(graph: Graph, layout: LayoutOf, keep: Collection[int] = ()) -> Graph:
    """`graph` with fused nodes. Values in `keep` remain values of the graph."""
    work = _Work(graph, frozenset({graph.output, *keep}))
    work.gates()
    work.linears()
    work.residuals()
    work.quantise(layout)
    work.together()
    work.quantised_outputs()
    work.glus()
    return work.graph()


class _Work:
    """The nodes between passes, in execution order; None where one has gone into another."""

    def __init__(self, graph: Graph, keep: frozenset[int]) -> None:
        self.original = graph
        self.keep = keep
        self.nodes: list[Node | None] = list(graph.nodes)
        self.values = list(graph.values)
        self.index()

    def index(self) -> None:
        """Who makes each value, and who uses it."""
        self.nodes = [node for node in self.nodes if node is not None]
        self.maker = {v: n for n, node in enumerate(self.nodes) if node for v in node.outputs}
        self.users: dict[int, list[int]] = {}
        for n, node in enumerate(self.nodes):
            for v in node.inputs if node else ():
                self.users.setdefault(v, []).append(n)

    def sole(self, value: int, op: str) -> Node | None:
        """The node that makes `value`, if it is an `op` and `value` has exactly one use."""
        node = self.nodes[self.maker[value]] if value in self.maker else None
        alone = len(self.users.get(value, ())) == 1 and value not in self.keep
        return node if node is not None and node.op == op and alone else None

    def shape(self, value: int) -> Shape:
        return self.values[value].shape

    def graph(self) -> Graph:
        nodes = tuple(node for node in self.nodes if node is not None)
        caches = tuple(n for n, node in enumerate(nodes) if node.op in ("sdpa", "conv", "recurrence"))
        return replace(self.original, nodes=nodes, values=tuple(self.values), caches=caches)

    # ------------------------------------------------------------------ the passes

    def gates(self) -> None:
        """act(a) · b."""
        for n, node in enumerate(self.nodes):
            if node is None or node.op != "binary" or node.params["kind"] != "mul" or len(node.inputs) != 2:
                continue
            for a, b in (node.inputs, node.inputs[::-1]):
                act = self.sole(a, "act")
                if act is not None and a != b and self.shape(a) == self.shape(b) == self.shape(node.outputs[0]):
                    self.nodes[self.maker[a]] = None
                    self.nodes[n] = Node("gate", (act.inputs[0], b), node.outputs, dict(act.params), (), node.scope)
                    break
        self.index()

    def linears(self) -> None:
        """Every matrix on its own first."""
        for n, node in enumerate(self.nodes):
            if node is not None and node.op == "linear" and len(node.inputs) == 1:
                slots = {w.slot: w for w in node.weights}
                part = Part(slots["weight"], slots.get("bias"))
                self.nodes[n] = replace(node, op="linears", params={"parts": (part,)})

    def residuals(self) -> None:
        """a + W·x."""
        for n, node in enumerate(self.nodes):
            if node is None or node.op != "binary" or node.params["kind"] != "add" or len(node.inputs) != 2:
                continue
            for y, other in (node.inputs, node.inputs[::-1]):
                linear = self.sole(y, "linears")
                if linear is None or linear.params["parts"][0].residual:
                    continue  # it has one already
                if y != other and self.shape(y) == self.shape(other) and len(self.shape(y)) == 2:
                    part = replace(linear.params["parts"][0], residual=1)
                    self.nodes[self.maker[y]] = None
                    inputs = (linear.inputs[0], other)
                    self.nodes[n] = replace(linear, inputs=inputs, outputs=node.outputs, params={"parts": (part,)})
                    break
        self.index()

    def quantise(self, layout: LayoutOf) -> None:
        """A quantised copy of every input of an integer matrix, one for each layout."""
        made: dict[tuple[int, Layout], int] = {}
        nodes: list[Node | None] = []
        for node in self.nodes:
            assert node is not None
            wanted = layout(node.weights[0]) if node.op in ("linear", "linears") else None
            if wanted is None:
                nodes.append(node)
                continue
            key = node.inputs[0], wanted
            if key not in made:
                source = self.values[node.inputs[0]]
                made[key] = len(self.values)
                self.values.append(Value(made[key], f"{source.name}~int8", source.shape))
                nodes.append(Node("quantise", (source.id,), (made[key],), _params(wanted), (), node.scope))
            nodes.append(replace(node, inputs=(made[key], *node.inputs[1:])))
        self.nodes = nodes
        self.index()

    def together(self) -> None:
        """Matrices with a common input, at the place of the first of them."""
        for value, users in self.users.items():
            matrices = [
                n
                for n in users
                if (node := self.nodes[n]) is not None and node.op == "linears" and node.inputs[0] == value
            ]
            first = min(matrices, default=0)
            able = [n for n in matrices if all(self.maker.get(v, -1) < first for v in self.nodes[n].inputs[1:])]  # type: ignore[union-attr]
            if len(able) > 1:
                self.nodes[first] = self.merged([self.nodes[n] for n in able])  # type: ignore[misc]
                for n in able:
                    self.nodes[n] = self.nodes[n] if n == first else None
        self.index()

    def merged(self, nodes: list[Node]) -> Node:
        inputs = list(nodes[0].inputs[:1])
        parts: list[Part] = []
        for node in nodes:
            for part in node.params["parts"]:
                if part.residual:
                    inputs.append(node.inputs[part.residual])
                    part = replace(part, residual=len(inputs) - 1)
                parts.append(part)
        outputs = tuple(v for node in nodes for v in node.outputs)
        return Node("linears", tuple(inputs), outputs, {"parts": tuple(parts)}, _weights(parts), nodes[0].scope)

    def quantised_outputs(self) -> None:
        """A norm or a gate that is only wanted quantised."""
        for n, node in enumerate(self.nodes):
            if node is None or node.op != "quantise":
                continue
            value = node.inputs[0]
            maker = self.sole(value, "norm") or self.sole(value, "gate")
            rows = self.shape(value)
            if maker is not None and len(rows) == 2 and (maker.op == "gate" or not maker.params["per_head"]):
                self.nodes[self.maker[value]] = None
                params: Mapping[str, Any] = {**maker.params, **node.params}
                self.nodes[n] = replace(maker, outputs=node.outputs, params=params)
        self.index()

    def glus(self) -> None:
        """A quantised gate of two matrices' outputs, while a unit of work, some whole blocks of columns, is small."""
        for n, node in enumerate(self.nodes):
            if node is None or node.op != "gate" or max(_layout(node)) >= LARGE:
                continue
            both, other = (self.sole(v, "linears") for v in node.inputs)
            if both is None or both is not other:
                continue
            made = dict(zip(both.outputs, both.params["parts"], strict=True))
            parts = tuple(made.pop(v) for v in node.inputs)
            if any(part.residual for part in parts):
                continue
            params = {**node.params, "parts": parts}
            self.nodes[n] = Node("glu", both.inputs[:1], node.outputs, params, _weights(parts), node.scope)
            rest = replace(
                both, outputs=tuple(made), params={"parts": tuple(made.values())}, weights=_weights(made.values())
            )
            self.nodes[self.maker[node.inputs[0]]] = rest if made else None
        self.index()


def _weights(parts: Iterable[Part]) -> tuple[Weight, ...]:
    return tuple(w for part in parts for w in (part.weight, part.bias) if w is not None)


def _layout(node: Node) -> Layout:
    return node.params.get("group", LARGE), node.params.get("rotation", 0)


def _params(layout: Layout) -> dict[str, int]:
    return {"group": layout[0], "rotation": layout[1]}
