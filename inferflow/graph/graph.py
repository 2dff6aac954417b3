"""The graph: a flat list of nodes over primitives, in execution order, with named values and the weights they own.

Immutable plain data. It is what the executor runs, and the seam for what comes later: fusion and sharding are functions from
Graph to Graph, and a flat native program is written from its nodes in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..spec.document import Where
from .axes import Axis, Shape, show

__all__ = ["Graph", "Node", "Value", "Weight"]


@dataclass(frozen=True)
class Value:
    """An edge. `id` indexes `Graph.values`."""

    id: int
    name: str
    shape: Shape

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"tensor {self.name} {show(self.shape)}"


@dataclass(frozen=True)
class Weight:
    """A tensor the model needs. `stack` and `layer` are "" and -1 outside a stack; `slot` is weight, bias or value.

    `key` (``layers.3.attn_q.weight``) is unique; the same key twice is the same tensor, used twice.
    """

    role: str
    slot: str
    shape: Shape
    stack: str = ""
    layer: int = -1
    where: Where = field(default=Where(), compare=False)  # the part of the spec that asked for it

    @property
    def key(self) -> str:
        return f"{self.stack}.{self.layer}.{self.role}.{self.slot}" if self.stack else f"{self.role}.{self.slot}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size or 0 for axis in self.shape)


@dataclass(frozen=True)
class Node:
    """One application of a primitive: ``outputs = op(inputs, weights, **params)``. `scope` is where it was written."""

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any]
    weights: tuple[Weight, ...]
    scope: str


@dataclass(frozen=True)
class Graph:
    """A whole model.

    `values[v]` is value `v`; `names` maps every tensor's name to its value; `inputs` are ``tokens`` and ``positions``;
    `output` is the logits, with axes (rows, vocab). `caches` lists the nodes (by index) that keep keys and values,
    or a state, of each sequence.
    """

    name: str
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: Mapping[str, int]
    output: int
    names: Mapping[str, int]
    layers: int
    caches: tuple[int, ...]

    @property
    def weights(self) -> dict[str, Weight]:
        """Every weight by key, in order of first use."""
        return {w.key: w for node in self.nodes for w in node.weights}

    @property
    def vocab(self) -> int:
        return self.axis(-1).size or 0

    def axis(self, n: int) -> Axis:
        return self.values[self.output].shape[n]
