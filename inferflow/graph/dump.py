"""A graph for people: a table of nodes with shapes, or a Mermaid flowchart, of one layer and what surrounds it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from .axes import show
from .graph import Graph, Node
from .primitives import PRIMITIVES, cost

__all__ = ["dump", "mermaid", "totals"]


def nodes_of(graph: Graph, layer: int | None) -> Iterator[tuple[int, Node]]:
    """The nodes outside every stack, and those of `layer` in each (all layers when None)."""
    for n, node in enumerate(graph.nodes):
        parts = node.scope.split(".")
        number = int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None
        if layer is None or number is None or number == layer:
            yield n, node


ALWAYS = (
    "kind",
    "eps",
    "scale",
    "score",
    "cap",
    "limit",
    "top_k",
    "dim",
    "theta",
    "n",
    "sizes",
)  # shown even at the default


def label(node: Node) -> str:
    """The primitive and its parameters: all that are not at their default, and those one checks against a paper."""
    if node.op in ("act", "reduce", "binary"):
        number = node.params.get("number")
        return str(node.params["kind"]) + (f" {number:g}" if isinstance(number, int | float) else "")
    signature = PRIMITIVES[node.op].signature
    shown = []
    for key, value in node.params.items():
        parameter = signature[key]
        default = parameter.default.value if isinstance(parameter.default, ast.Constant) else parameter.default_text
        if value is not None and parameter.type != "axis" and key != "shape" and (key in ALWAYS or value != default):
            shown.append(f"{key}={_short(value)}")
    return f"{node.op}({', '.join(shown)})" if shown else node.op


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}={_short(v)}" for k, v in value.items()) + "}"
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"


def dump(graph: Graph, layer: int | None = 0) -> str:
    """One line a node: ``name [axes] = op(parameters)(inputs)  weights``."""
    lines = [f"# {graph.name}: {graph.layers} layers, {len(graph.nodes)} nodes, {len(graph.weights)} weights"]
    for _, node in nodes_of(graph, layer):
        outs = ", ".join(f"{graph.values[v].name} {show(graph.values[v].shape)}" for v in node.outputs)
        ins = ", ".join(graph.values[v].name for v in node.inputs)
        owned = "".join(f"  {w.key} {show(w.shape)}" for w in node.weights)
        lines.append(f"{outs} = {label(node)}({ins}){owned}")
    return "\n".join(lines)


def mermaid(graph: Graph, layer: int | None = 0) -> str:
    """The same as a Mermaid flowchart (https://mermaid.js.org)."""
    lines = ["flowchart TD"]
    shown = dict(nodes_of(graph, layer))
    maker = {v: n for n, node in shown.items() for v in node.outputs}
    for n, node in shown.items():
        shape = show(graph.values[node.outputs[0]].shape)
        lines.append(f'  n{n}["{node.scope + "<br/>" if node.scope else ""}{label(node)}<br/>{shape}"]')
        for v in node.inputs:
            if v in maker:
                lines.append(f"  n{maker[v]} --> n{n}")
            else:
                lines.append(f'  v{v}(["{graph.values[v].name}"]) --> n{n}')
    return "\n".join(lines)


def totals(graph: Graph) -> dict[str, int]:
    """What one token costs: ``flops``, ``flops_per_key``, ``weights`` (elements read), ``kv`` (elements cached)."""
    out = {"flops": 0, "flops_per_key": 0, "weights": 0, "kv": 0}
    for node in graph.nodes:
        c = cost(node.op, tuple(graph.values[v].shape for v in node.inputs), node.params)
        for key, value in (
            ("flops", c.flops),
            ("flops_per_key", c.flops_per_key),
            ("weights", c.weights),
            ("kv", c.kv),
        ):
            out[key] += value
    return out
