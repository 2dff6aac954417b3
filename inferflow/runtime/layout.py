"""Where a program's values live: views of buffers, and the memory plan that lets buffers with disjoint lives share addresses.

Every value that has a row per token (or per wanted row of logits) is a buffer of so many 4-byte words a row; its address is
an offset in words times the number of rows there is room for. Offsets are found first-fit, in the order of the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import UnsupportedError
from ..kernels import native

__all__ = ["Arena", "View"]

ALIGN = 16  # words: a cache line


@dataclass(frozen=True)
class View:
    """A value: `sizes` and `strides` (words) of its axes beside the leading one. `buffer` is -1 for a constant, which is
    `data`; `leading` says what the rows are; `stride` is the distance of two of them."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    leading: int
    buffer: int = -1
    offset: int = 0
    stride: int = 0
    data: np.ndarray | None = field(default=None, compare=False)

    @property
    def contiguous(self) -> bool:
        return self.strides == row_major(self.sizes)

    def struct(self) -> native.Tensor:
        """As the native library takes it."""
        if len(self.sizes) > native.MAX_DIMS:
            fix = f"the native engine takes {native.MAX_DIMS}; use engine='reference'"
            raise UnsupportedError(f"a tensor of {len(self.sizes)} axes a token", where="spec", fix=fix)
        tensor = native.Tensor(None, self.buffer, self.leading, len(self.sizes), 0, self.offset, self.stride)
        if self.data is not None:
            tensor.data = self.data.ctypes.data
        tensor.sizes[: len(self.sizes)] = self.sizes
        tensor.strides[: len(self.strides)] = self.strides
        return tensor

    def heads(self, n: int) -> View:
        """The last axis as n × (size / n)."""
        size, stride = self.sizes[-1] // n, self.strides[-1]
        return replace(self, sizes=(*self.sizes[:-1], n, size), strides=(*self.strides[:-1], size * stride, stride))

    def merged(self) -> View | None:
        """The last two axes as one; None where they do not follow one another in memory."""
        if self.strides[-2] != self.sizes[-1] * self.strides[-1]:
            return None
        sizes = (*self.sizes[:-2], self.sizes[-2] * self.sizes[-1])
        return replace(self, sizes=sizes, strides=(*self.strides[:-2], self.strides[-1]))

    def part(self, first: int, size: int) -> View:
        """Elements [first, first + size) of the last axis."""
        return replace(self, sizes=(*self.sizes[:-1], size), offset=self.offset + first * self.strides[-1])

    def at(self, index: Sequence[int]) -> View:
        """The view with its first axes fixed."""
        n = len(index)
        offset = self.offset + sum(i * s for i, s in zip(index, self.strides, strict=False))
        return replace(self, sizes=self.sizes[n:], strides=self.strides[n:], offset=offset)


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous array."""
    return tuple(math.prod(sizes[n + 1 :]) for n in range(len(sizes)))


class Arena:
    """Buffers of a number of words per row that rises as late as possible. `memory` holds room for `capacity` rows."""

    def __init__(self) -> None:
        self.offsets: list[int] = []  # of buffer n, in words per row
        self.words: list[int] = []
        self.live: dict[int, tuple[int, int]] = {}  # buffer -> (offset, words)
        self.total = 0
        self.capacity = 0
        self.memory = np.empty(0, np.float32)

    def take(self, words: int) -> int:
        """A new buffer, where nothing alive is."""
        size = -(-max(words, 1) // ALIGN) * ALIGN
        at = 0
        for offset, length in sorted(self.live.values()):
            if offset - at >= size:
                break
            at = max(at, offset + length)
        number = len(self.offsets)
        self.offsets.append(at)
        self.words.append(size)
        self.live[number] = (at, size)
        self.total = max(self.total, at + size)
        return number

    def give(self, number: int) -> None:
        """The buffer's life has ended."""
        del self.live[number]

    def reserve(self, rows: int) -> bool:
        """Make room for `rows` rows; whether that moved the memory. UnsupportedError where there is none."""
        if rows <= self.capacity:
            return False
        try:
            memory = np.empty(self.total * rows + ALIGN, np.float32)
        except MemoryError:
            reason = f"there is no memory for a step of {rows} tokens ({self.total * rows * 4 >> 20} MB)"
            raise UnsupportedError(reason, where="budget", fix="lower the token budget") from None
        start = -(memory.ctypes.data // 4) % ALIGN
        self.memory = memory[start : start + self.total * rows]
        self.capacity = rows
        return True

    def addresses(self) -> list[int]:
        """Of every buffer, in bytes."""
        base = self.memory.ctypes.data
        return [base + offset * self.capacity * 4 for offset in self.offsets]
