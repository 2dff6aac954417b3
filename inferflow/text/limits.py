"""What one rendering of a chat template may cost. Templates come with model files: they are hostile input.

Three invariants keep every single operation small, so that counting operations bounds the whole: no text is longer, and no
container weighs more (items plus characters, nested ones counted as often as they are reached), than `Meter.size`; all
that is produced adds up to at most `Meter.work`; and the thread's CPU time is at most `seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["LimitError", "Meter", "Ticking", "ticking"]

_BASE_SIZE = 4 << 20
_WORK = 16
_STEPS_BETWEEN_LOOKS = 256
_CONTAINERS = (list, tuple, set, frozenset, Mapping)


class LimitError(Exception):
    """The template asks for too much; the message says of what."""


class Meter:
    """The budget of one rendering whose input holds `input_size` characters."""

    def __init__(self, input_size: int, seconds: float) -> None:
        self.size = _BASE_SIZE + 4 * input_size
        self.work = _WORK * self.size
        self.seconds = seconds
        self._deadline = time.thread_time() + seconds
        self._unlooked = 0

    def step(self, count: int = 1) -> None:
        """`count` small operations are being done."""
        self._unlooked += count
        if self._unlooked >= _STEPS_BETWEEN_LOOKS:
            self._unlooked = 0
            if time.thread_time() > self._deadline:
                raise LimitError(f"takes more than {self.seconds:g} seconds")

    def text(self, length: int) -> None:
        """A text of `length` characters is about to be made, or has been."""
        if length > self.size:
            raise LimitError(f"makes a text of more than {self.size} characters")
        self.work -= length
        if self.work < 0:
            raise LimitError("makes too much text in all")
        self.step(1 + (length >> 10))

    def value(self, value: Any) -> Any:
        """`value`, once it is known to be small enough."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, _CONTAINERS):
            self.text(self.weight(value))
        return value

    def weight(self, value: Any) -> int:
        """Items and characters in a value, nested ones included."""
        total = 0
        stack = [value]
        while stack:
            item = stack.pop()
            total += 1
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, _CONTAINERS):
                stack.extend(item)
            if total + len(stack) > self.size:
                raise LimitError(f"makes a list or mapping that weighs more than {self.size}")
            self.step()
        return total


class Ticking:
    """An iterable whose every item counts as a step. Keeps the length of what it wraps, where that has one."""

    def __init__(self, items: Iterable[Any], meter: Meter) -> None:
        self._items = items
        self._meter = meter

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._meter.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


def ticking(items: Iterable[Any], meter: Meter) -> Iterator[Any]:
    """An iterator whose every item counts as a step."""
    for item in items:
        meter.step()
        yield item
