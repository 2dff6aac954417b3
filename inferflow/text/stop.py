"""Stop strings, matched on the text as it streams, whatever the pieces it comes in.

The first stop to be complete wins; of several that end at the same character, the longest. Only text that may still turn
out to be the beginning of a stop is held back. One Knuth-Morris-Pratt automaton a stop: constant time a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..errors import ArgumentError

__all__ = ["StopMatcher"]


class StopMatcher:
    """Feed it text, emit what it returns; when `matched` is set, the text has ended (the stop itself is cut off)."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise ArgumentError("stops is a string", where="stop", fix="pass a list of strings")
        for stop in stops:
            if not stop or not isinstance(stop, str):
                raise ArgumentError(f"{stop!r} is no stop string", where="stop", fix="pass non-empty strings")
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)  # how much of each stop the text ends with
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is now certain. After a match: nothing."""
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        for at, character in enumerate(text, start=len(self._held) + 1):
            stop = self._step(character)
            if stop is not None:
                self.matched, self._held = stop, ""
                return pending[: at - len(stop)]
        certain = len(pending) - max(self._lengths)
        self._held = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """The text that was held back, at the end of a stream that no stop ended."""
        rest, self._held = self._held, ""
        self._lengths = [0] * len(self._stops)
        return rest

    def _step(self, character: str) -> str | None:
        """Advances every automaton by one character; the longest stop that is complete, if one is."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            length, fallback = self._lengths[index], self._fallbacks[index]
            while length and stop[length] != character:
                length = fallback[length - 1]
            if stop[length] == character:
                length += 1
            self._lengths[index] = length
            if length == len(stop) and (complete is None or length > len(complete)):
                complete = stop
        return complete


@lru_cache(256)  # all answers of a request have the same stops
def _fallback(stop: str) -> tuple[int, ...]:
    """For every prefix of `stop`, the length of its longest proper suffix that is a prefix of `stop`."""
    table = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = table[length - 1]
        if stop[at] == stop[length]:
            length += 1
        table[at] = length
    return tuple(table)
