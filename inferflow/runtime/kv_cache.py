"""The reference engine's cache: keys and values in blocks of positions, and the states of the nodes that have one."""

from __future__ import annotations

import numpy as np

from ..errors import UnsupportedError
from ..graph.graph import Graph, Node
from ..graph.primitives import PRIMITIVES

__all__ = ["KVCache", "state_shape"]


class KVCache:
    """Keys and values of every caching node: ``keys[node]`` is float32 [blocks, block_size, kv_heads, head_dim]; and
    ``states[node]``, float32 [blocks, …]: there are as many slots as blocks.

    Raises UnsupportedError where there is no memory for that.
    """

    kind = "f32"

    def __init__(self, graph: Graph, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.sequences = blocks
        self.keys: dict[int, np.ndarray] = {}
        self.values: dict[int, np.ndarray] = {}
        self.states: dict[int, np.ndarray] = {}
        try:  # np.zeros maps pages lazily: memory is used as blocks are written
            for n in graph.caches:
                node = graph.nodes[n]
                if node.op != "sdpa":
                    self.states[n] = np.zeros((blocks, *state_shape(graph, node)), np.float32)
                    continue
                k, v = (graph.values[i].shape for i in node.inputs[1:3])
                for store, shape in ((self.keys, k), (self.values, v)):
                    store[n] = np.zeros((blocks, block_size, shape[1].size or 0, shape[2].size or 0), np.float32)
        except (MemoryError, ValueError):
            reason = f"there is no memory for a KV cache of {blocks * block_size} positions"
            raise UnsupportedError(reason, where="max_model_len", fix="lower max_model_len") from None
        self.arrays = [*self.keys.values(), *self.values.values()]


def state_shape(graph: Graph, node: Node) -> tuple[int, ...]:
    """What one sequence's last token leaves at a node that has a state."""
    make = PRIMITIVES[node.op].state
    assert make is not None
    return make(tuple(graph.values[v].shape for v in node.inputs), node.params)
