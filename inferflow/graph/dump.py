"""A graph for people: a table of nodes with shapes, or a Mermaid flowchart, of one layer and what surrounds it."""

from __future__ import annotations

from collections.abc import Iterator

from .axes import show
from .graph import Graph, Node
from .primitives import cost

__all__ = ["dump", "mermaid", "totals"]


def nodes_of(graph: Graph, layer: int | None) -> Iterator[tuple[int, Node]]:
    """The nodes outside every stack, and those of `layer` in each (all layers when None)."""
    for n, node in enumerate(graph.nodes):
        parts = node.scope.split(".")
        number = int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None
        if layer is None or number is None or number == layer:
            yield n, node


def label(node: Node) -> str:
    """The primitive with the parameters that matter to a reader."""
    named = {
        k: v
        for k, v in node.params.items()
        if k in ("kind", "number", "n", "dim", "theta", "pairing", "window", "chunk", "softcap", "top_k")
    }
    named = {k: v for k, v in named.items() if v is not None}
    if node.op in ("act", "reduce", "binary"):
        number = named.get("number")
        return str(named["kind"]) + (f" {number:g}" if isinstance(number, int | float) else "")
    inside = ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in named.items())
    return f"{node.op}({inside})" if inside else node.op


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
