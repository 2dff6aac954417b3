"""The paged key-value cache: fixed blocks of positions, owned by sequences through block tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import UnsupportedError
from ..graph.graph import Graph

__all__ = ["BlockPool", "KVCache"]


class KVCache:
    """Keys and values of every caching node: ``keys[node]`` is float32 [blocks, block_size, kv_heads, head_dim]; and the
    states of the nodes that have one, by node and by the first block of the sequence.

    Raises UnsupportedError where there is no memory for that.
    """

    kind = "f32"

    def __init__(self, graph: Graph, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.sequences = blocks
        self.keys: dict[int, np.ndarray] = {}
        self.values: dict[int, np.ndarray] = {}
        self.states: dict[tuple[int, int], np.ndarray] = {}
        for n in (n for n in graph.caches if graph.nodes[n].op == "sdpa"):
            k, v = (graph.values[i].shape for i in graph.nodes[n].inputs[1:3])
            for store, shape in ((self.keys, k), (self.values, v)):
                sizes = (blocks, block_size, shape[1].size or 0, shape[2].size or 0)
                try:  # np.zeros maps pages lazily: memory is used as blocks are written
                    store[n] = np.zeros(sizes, np.float32)
                except (MemoryError, ValueError):
                    reason = f"there is no memory for a KV cache of {blocks * block_size} positions"
                    raise UnsupportedError(reason, where="max_model_len", fix="lower max_model_len") from None

    def release(self, blocks: Sequence[int]) -> None:
        """The sequence that owns `blocks` has ended."""
        for key in [key for key in self.states if key[1] in blocks[:1]]:
            del self.states[key]


class BlockPool:
    """Free blocks, handed out lowest first. Every block has at most one owner."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = list(range(blocks - 1, -1, -1))
        self.owned = bytearray(blocks)  # 1 while a sequence has it

    def take(self, count: int) -> list[int]:
        """`count` blocks; UnsupportedError when there are not so many."""
        if count > len(self.free):
            fix = "shorten the prompt or max_tokens, or raise max_model_len"
            raise UnsupportedError(
                f"the KV cache has {len(self.free)} free blocks of {self.blocks}, {count} are needed", fix=fix
            )
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            self.owned[block] = 1
        return taken

    def give(self, blocks: list[int]) -> None:
        """Return blocks that `take` handed out."""
        for block in reversed(blocks):
            if not self.owned[block]:
                raise AssertionError(f"block {block} was returned twice")
            self.owned[block] = 0
            self.free.append(block)
