"""Cutting text at literal tokens: control and user-defined tokens, which are found before anything else is done.

The longest token is looked for first in the whole text, then the next in what is left, as the GGUF reference does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

__all__ = ["Literals"]


class Literals:
    """The literal tokens of a vocabulary. `control` are found only in trusted text, `always` everywhere."""

    def __init__(self, control: Mapping[str, int], always: Mapping[str, int]) -> None:
        everything = [
            *((text, token, True) for text, token in control.items()),
            *((t, i, False) for t, i in always.items()),
        ]
        self._ordered = sorted(
            (entry for entry in everything if entry[0]), key=lambda entry: -len(entry[0].encode("utf-8", "replace"))
        )

    def cut(self, text: str, trusted: Sequence[tuple[int, int]]) -> list[str | int]:
        """`text` as texts and token ids in order; no empty texts."""
        fragments: list[tuple[int, int, int | None]] = [(0, len(text), None)] if text else []
        for literal, token, control in self._ordered:
            if (control and not trusted) or literal not in text:
                continue
            fragments = [
                part
                for fragment in fragments
                for part in (self._cut_one(text, fragment, literal, token, trusted if control else None))
            ]
        return [text[start:end] if token is None else token for start, end, token in fragments]

    @staticmethod
    def _cut_one(
        text: str,
        fragment: tuple[int, int, int | None],
        literal: str,
        token: int,
        trusted: Sequence[tuple[int, int]] | None,
    ) -> list[tuple[int, int, int | None]]:
        start, end, found = fragment
        if found is not None:
            return [fragment]
        parts: list[tuple[int, int, int | None]] = []
        search = start
        while (at := text.find(literal, search, end)) >= 0:
            after = at + len(literal)
            if trusted is not None and not _inside(at, after, trusted):
                search = at + 1
                continue
            if at > start:
                parts.append((start, at, None))
            parts.append((at, after, token))
            start = search = after
        if start < end:
            parts.append((start, end, None))
        return parts


def _inside(start: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether one of the sorted, disjoint `spans` holds start..end whole."""
    at = bisect_right(spans, start, key=lambda span: span[0]) - 1
    return at >= 0 and end <= spans[at][1]
