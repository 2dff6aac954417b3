"""Cutting text at literal tokens: control and user-defined tokens, which are found before anything else is done.

The longest token is looked for first in the whole text, then the next in what is left, as the GGUF reference does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Literals", "Words"]

_PREFIX = 4

Span = tuple[int, int]


class Words:
    """Finds which of many words a text holds. Vocabularies have thousands of control tokens, most with the same
    beginning: a beginning that the text does not hold settles all its words at once."""

    def __init__(self, words: Iterable[str]) -> None:
        self._by_prefix: dict[str, list[str]] = {}
        for word in filter(None, words):
            self._by_prefix.setdefault(word[:_PREFIX], []).append(word)

    def found(self, text: str) -> list[str]:
        """The words that occur in `text`, in no particular order."""
        groups = [words for prefix, words in self._by_prefix.items() if prefix in text]
        return [word for words in groups for word in words if word in text]


class Literals:
    """The literal tokens of a vocabulary. `control` are found only in trusted text, `always` everywhere."""

    def __init__(self, control: Mapping[str, int], always: Mapping[str, int]) -> None:
        self._control, self._always = dict(control), dict(always)
        self._control_words, self._always_words = Words(control), Words(always)

    def cut(self, text: str, trusted: Sequence[Span]) -> list[str | int]:
        """`text` as texts and token ids in order; no empty texts."""
        fragments: list[tuple[int, int, int | None]] = [(0, len(text), None)] if text else []
        found: list[tuple[str, int, Sequence[Span] | None]]
        found = [(word, self._always[word], None) for word in self._always_words.found(text)]
        if trusted:
            found += [(word, self._control[word], trusted) for word in self._control_words.found(text)]
        for word, token, spans in sorted(
            found, key=lambda entry: (-len(entry[0].encode("utf-8", "replace")), entry[1])
        ):
            fragments = [part for fragment in fragments for part in self._cut_one(text, fragment, word, token, spans)]
        return [text[start:end] if token is None else token for start, end, token in fragments]

    @staticmethod
    def _cut_one(
        text: str,
        fragment: tuple[int, int, int | None],
        literal: str,
        token: int,
        trusted: Sequence[Span] | None,
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


def _inside(start: int, end: int, spans: Sequence[Span]) -> bool:
    """Whether one of the sorted, disjoint `spans` holds start..end whole."""
    at = bisect_right(spans, start, key=lambda span: span[0]) - 1
    return at >= 0 and end <= spans[at][1]
