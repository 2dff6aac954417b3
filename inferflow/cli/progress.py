"""One line on a terminal that shows how far a download is; nothing at all anywhere else."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from inferflow.weights.cache import Progress

__all__ = ["progress_line"]

_SECONDS = 0.1  # between two drawings
_WORDS = {"download": "downloading", "extract": "unpacking"}


@contextmanager
def progress_line(stream: TextIO) -> Iterator[Progress | None]:
    """A progress callback that draws on `stream`, or None where that is no terminal. The line is wiped at the end."""
    if not stream.isatty():
        yield None
        return
    drawn, last_phase = 0.0, ""

    def draw(phase: str, done: int, total: int | None) -> None:
        nonlocal drawn, last_phase
        now = time.monotonic()
        if phase == last_phase and now - drawn < _SECONDS and done != total:
            return
        drawn, last_phase = now, phase
        width = shutil.get_terminal_size().columns - 1
        stream.write("\r\x1b[K" + _line(phase, done, total)[: max(width, 0)])
        stream.flush()

    try:
        yield draw
    finally:
        if drawn:
            stream.write("\r\x1b[K")
            stream.flush()


def _line(phase: str, done: int, total: int | None) -> str:
    word = f"{_WORDS.get(phase, phase):<12}"
    if not total:
        return f"{word} {done / 1e6:.1f} MB"
    filled = 30 * min(done, total) // total
    return f"{word} [{'#' * filled}{'.' * (30 - filled)}] {done / 1e6:.1f} / {total / 1e6:.1f} MB"
