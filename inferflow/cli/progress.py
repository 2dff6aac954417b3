"""One line on a terminal that shows how far a download or a computation is; nothing at all anywhere else."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from inferflow.weights.cache import Progress

__all__ = ["progress_line", "steps_line"]

_SECONDS = 0.1  # between two drawings
_WORDS = {"download": "downloading", "extract": "unpacking"}


@contextmanager
def progress_line(stream: TextIO) -> Iterator[Progress | None]:
    """A progress callback that draws bytes on `stream`, or None where that is no terminal. The line is wiped at the end."""
    if not stream.isatty():
        yield None
        return
    with _drawing(stream) as draw:
        yield lambda phase, done, total: draw(phase, _bytes(phase, done, total), done == total)


@contextmanager
def steps_line(stream: TextIO, word: str) -> Iterator[Callable[[int, int], None]]:
    """A callback (steps done, steps in all) that draws them on `stream`, with the time left, once a thousandth is done; many
    millions are told as such. On no terminal it does nothing. The line is wiped at the end."""
    if not stream.isatty():
        yield lambda done, total: None
        return
    start = time.monotonic()
    with _drawing(stream) as draw:

        def step(done: int, total: int) -> None:
            known = total <= 1000 * done and done < total
            left = f", {_duration((time.monotonic() - start) / done * (total - done))} left" if known else ""
            steps = f"{done} / {total}" if total < 10_000_000 else f"{done / 1e6:.0f} / {total / 1e6:.0f} M"
            draw(word, f"{_bar(word, done, total)} {steps}{left}", done == total)

        yield step


@contextmanager
def _drawing(stream: TextIO) -> Iterator[Callable[[str, str, bool], None]]:
    """draw(phase, text, now): not more often than the eye can follow, unless the phase is new or it must be `now`."""
    drawn, last_phase = 0.0, ""

    def draw(phase: str, text: str, at_once: bool) -> None:
        nonlocal drawn, last_phase
        now = time.monotonic()
        if phase == last_phase and now - drawn < _SECONDS and not at_once:
            return
        drawn, last_phase = now, phase
        width = shutil.get_terminal_size().columns - 1
        stream.write("\r\x1b[K" + text[: max(width, 0)])
        stream.flush()

    try:
        yield draw
    finally:
        if drawn:
            stream.write("\r\x1b[K")
            stream.flush()


def _bytes(phase: str, done: int, total: int | None) -> str:
    word = _WORDS.get(phase, phase)
    if not total:
        return f"{word:<12} {done / 1e6:.1f} MB"
    return f"{_bar(word, done, total)} {done / 1e6:.1f} / {total / 1e6:.1f} MB"


def _bar(word: str, done: int, total: int) -> str:
    filled = 30 * min(done, total) // max(total, 1)
    return f"{word:<12} [{'#' * filled}{'.' * (30 - filled)}]"


def _duration(seconds: float) -> str:
    """``42 s``, ``3:05 min`` or ``2:07 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"
