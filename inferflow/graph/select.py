"""Logits only for the rows asked for: a `select` node goes in as early as no token sees another any more.

From the logits back, as long as a node is token-wise and has one tensor that varies with the token, its rows are
independent; `select` goes before the first node of that run.
"""

from __future__ import annotations

from dataclasses import replace

from .axes import TOKENS, Axis, Shape
from .graph import Graph, Node, Value
from .primitives import PRIMITIVES

__all__ = ["select_rows"]

ROWS = Axis("rows", None)


def select_rows(graph: Graph) -> Graph:
    """`graph` with one `select` node; its output's axes become (rows, vocab)."""
    maker = {out: n for n, node in enumerate(graph.nodes) for out in node.outputs}
    run: list[int] = []
    at = graph.output
    while at in maker:
        node = graph.nodes[maker[at]]
        varying = [v for v in node.inputs if TOKENS in graph.values[v].shape]
        if not PRIMITIVES[node.op].token_wise or len(varying) != 1 or len(node.outputs) != 1:
            break
        run.append(maker[at])
        at = varying[0]
    values = list(graph.values)
    selected = Value(len(values), "selected", _rows(values[at].shape))
    values.append(selected)
    first = min(run, default=len(graph.nodes))
    nodes = list(graph.nodes)
    for n in run:
        node = nodes[n]
        nodes[n] = replace(node, inputs=tuple(selected.id if v == at else v for v in node.inputs))
        for out in node.outputs:
            values[out] = replace(values[out], shape=_rows(values[out].shape))
    nodes.insert(first, Node("select", (at,), (selected.id,), {}, (), ""))
    output = selected.id if at == graph.output else graph.output
    caches = tuple(n + (n >= first) for n in graph.caches)
    return replace(graph, values=tuple(values), nodes=tuple(nodes), output=output, caches=caches)


def _rows(shape: Shape) -> Shape:
    return tuple(ROWS if axis == TOKENS else axis for axis in shape)
