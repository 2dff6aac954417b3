"""Blocks of the key-value cache: who refers to them, which are free, and which hold a prefix that is known.

A full block is known by a SHA-256 digest chained over its parent's, its tokens and, at the root, whatever else its contents
depend on: two prompts share a block only when all before it is the same. Nothing is moved or cleared when a block is freed.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import UnsupportedError

__all__ = ["BlockPool", "chain", "root"]


def root(extras: Mapping[str, object]) -> bytes:
    """The digest that a chain begins with: `extras` by their tags, such as ``cache_salt``."""
    return hashlib.sha256(json.dumps(extras, sort_keys=True).encode()).digest()


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a block with these tokens, after the block (or root) `parent`."""
    return hashlib.sha256(parent + np.asarray(tokens, "<i8").tobytes()).digest()


class BlockPool:
    """`blocks` blocks with reference counts. `free` are those that nobody refers to, in the order in which they are taken:
    first those that hold nothing known, then known ones, the least recently used first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.references = [0] * blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.digests: dict[int, bytes] = {}
        self.known: dict[bytes, int] = {}

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each; UnsupportedError when there are not so many."""
        if count > len(self.free):
            fix = "shorten the prompt or max_tokens, or raise max_model_len"
            raise UnsupportedError(
                f"the KV cache has {len(self.free)} free blocks of {self.blocks}, {count} are needed", fix=fix
            )
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.references[block] = 1
            self.forget(block)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each."""
        for block in blocks:
            self.free.pop(block, None)
            self.references[block] += 1

    def give(self, blocks: Sequence[int]) -> None:
        """One reference to each less. The end of a prefix is forgotten before its beginning, which more prompts share."""
        for block in reversed(blocks):
            if not self.references[block]:
                raise AssertionError(f"block {block} was returned twice")
            self.references[block] -= 1
            if not self.references[block]:
                self.free[block] = None
                if block not in self.digests:
                    self.free.move_to_end(block, last=False)

    def remember(self, block: int, digest: bytes) -> None:
        """`block` is full, and that is its digest. Of several with the same contents the first is known."""
        if digest not in self.known:
            self.known[digest] = block
            self.digests[block] = digest

    def forget(self, block: int) -> None:
        """`block` is going to hold something else."""
        self.known.pop(self.digests.pop(block, b""), None)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain. They may be free: `share` them before the next `take`."""
        found = []
        for digest in digests:
            block = self.known.get(digest)
            if block is None:
                break
            found.append(block)
        return found
