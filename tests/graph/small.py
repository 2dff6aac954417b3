"""Graphs of small specs over decoder.toml, for one config and no weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from inferflow.graph.build import build_graph
from inferflow.graph.graph import Graph, Node
from inferflow.spec.library import load_spec

CONFIG: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def graph_of(text: str, base: str = "decoder", **config: Any) -> Graph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.toml"
        path.write_text((f'extends = "{base}"\n' if base else "") + text, "utf-8")
        return build_graph(load_spec(path), {**CONFIG, **config}).graph


def ops(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


def shape(graph: Graph, name: str) -> str:
    return str([str(axis) for axis in graph.values[graph.names[name]].shape])
