"""The second tier: keys, values and states of sequences that were put aside, in a file without a name."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO

import numpy as np

from .executor import Cache

__all__ = ["Saved", "SwapFile", "copy_block"]


def copy_block(cache: Cache, source: int, target: int) -> None:
    """Keys and values of block `target` become those of `source`."""
    for array in cache.arrays:
        array[target] = array[source]


@dataclass(frozen=True)
class Saved:
    """A sequence in the file: its rows, and the process that wrote them."""

    rows: tuple[int, ...]
    process: int


class SwapFile:
    """At most `capacity` bytes, in rows of one block each (or one slot's states). A forked child writes a file of its own:
    what its parent saved is lost to it, and is computed again."""

    def __init__(self, cache: Cache, capacity: int) -> None:
        self.cache = cache
        states = sum(a[:1].nbytes for a in cache.states.values())
        self.row_bytes = max(states, sum(a[:1].nbytes for a in cache.arrays), 1)
        self.rows = capacity // self.row_bytes
        self.process = 0
        self.free: list[int] = []
        self.file: FileIO

    def save(self, blocks: Sequence[int], slot: int) -> Saved | None:
        """Write the sequence with these blocks and this slot; None where the file, or the disk, is full."""
        if self.process != os.getpid():
            self._open()
        pieces = list(self._pieces(blocks, slot))
        if len(pieces) > len(self.free):
            return None
        saved = Saved(tuple(self.free.pop() for _ in pieces), self.process)
        try:
            for row, piece in zip(saved.rows, pieces, strict=True):
                self.file.seek(row * self.row_bytes)
                for array in piece:
                    if self.file.write(array.data) < array.nbytes:
                        raise OSError(errno.ENOSPC, "the disk is full")
        except OSError:  # whoever asked computes it again
            self.drop(saved)
            return None
        return saved

    def load(self, saved: Saved, blocks: Sequence[int], slot: int) -> None:
        """Read it back, into blocks and a slot that need not be those it came from; its rows are free again."""
        for row, piece in zip(saved.rows, self._pieces(blocks, slot), strict=True):
            self.file.seek(row * self.row_bytes)
            for array in piece:
                self.file.readinto(array.data)
        self.drop(saved)

    def holds(self, saved: Saved) -> bool:
        return saved.process == os.getpid()

    def drop(self, saved: Saved) -> None:
        """Its rows are free again."""
        if self.holds(saved):
            self.free += saved.rows

    def _pieces(self, blocks: Sequence[int], slot: int) -> Iterator[list[np.ndarray]]:
        """What goes into one row each, as views."""
        if self.cache.states:
            yield [a[slot : slot + 1] for a in self.cache.states.values()]
        if self.cache.arrays:
            for block in blocks:
                yield [a[block : block + 1] for a in self.cache.arrays]

    def _open(self) -> None:
        self.process = os.getpid()
        self.free = list(range(self.rows - 1, -1, -1))
        # Unbuffered: what the disk cannot take is known at once, and not when something else is read.
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # it lives as long as this object
        weakref.finalize(self, self.file.close)
