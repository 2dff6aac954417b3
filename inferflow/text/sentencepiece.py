"""SentencePiece's BPE: adjacent pieces are merged, the pair whose merged piece has the highest score first (on a tie
the leftmost), until no merged piece is in the vocabulary; what is then unknown goes out as byte tokens.

Run directly on pieces and scores: rebuilding a table of merges for the `tokenizers` library takes seconds for a large
vocabulary. Text is cut into words first (before a space mark, where no piece of the vocabulary reaches across), which
changes nothing in the result and lets repeated words come from a cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from .literals import Literals
from .pieces import BYTE_TOKEN, METASPACE

__all__ = ["SentencePiece"]

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_CACHED_WORDS = 50_000
_CACHED_LENGTH = 32


class SentencePiece:
    """A `Backend`. Only ordinary pieces take part in merges: no run of merges makes a control or byte token."""

    def __init__(
        self, tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], add_space: bool, unknown: int | None
    ) -> None:
        by_type: dict[int, list[int]] = {kind: [] for kind in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)}
        for token, kind in enumerate(types[: len(tokens)]):
            if kind in by_type:
                by_type[kind].append(token)
        self._ids = dict(zip(tokens, range(len(tokens)), strict=True))
        for kind in (_UNKNOWN, _CONTROL, _BYTE):
            for token in by_type[kind]:
                self._ids.pop(tokens[token], None)
        self._scores = scores
        self._byte_ids = _byte_ids(tokens, by_type[_BYTE], self._ids, unknown)
        control = {tokens[token]: token for token in (*by_type[_UNKNOWN], *by_type[_CONTROL])}
        self._literals = Literals(control, {tokens[token]: token for token in by_type[_USER_DEFINED]})
        self._add_space = add_space
        self._word = _word_pattern(tokens)
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, trusted: Sequence[tuple[int, int]]) -> list[int]:
        """See `Backend.encode`. A space goes before text at the start and after a literal, where the model wants it."""
        ids: list[int] = []
        at_start = True
        for part in self._literals.cut(text, trusted):
            if isinstance(part, int):
                ids.append(part)
                at_start = True
                continue
            part = part.replace(" ", METASPACE)
            if self._add_space and at_start:
                part = METASPACE + part
            at_start = False
            for word in self._word.findall(part):
                ids.extend(self._encode_word(word))
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        found = self._cache.get(word)
        if found is None:
            found = tuple(self._pieces_to_ids(self._merge(word)))
            if len(word) <= _CACHED_LENGTH and len(self._cache) < _CACHED_WORDS:
                self._cache[word] = found
        return found

    def _merge(self, word: str) -> list[str]:
        """The word's pieces when no more can be merged."""
        pieces = list(word)
        count = len(pieces)
        following, previous = list(range(1, count + 1)), list(range(-1, count - 1))
        heap = [entry for left in range(count - 1) for entry in self._candidate(pieces, left, left + 1)]
        heapify(heap)
        while heap:
            _, left, right, merged = heappop(heap)
            if following[left] != right or len(pieces[left]) + len(pieces[right]) != len(merged) or not pieces[left]:
                continue  # one of the two was merged with another in the meantime
            pieces[left], pieces[right] = merged, ""
            after = following[left] = following[right]
            if after < count:
                previous[after] = left
                for entry in self._candidate(pieces, left, after):
                    heappush(heap, entry)
            if previous[left] >= 0:
                for entry in self._candidate(pieces, previous[left], left):
                    heappush(heap, entry)
        return [piece for piece in pieces if piece]

    def _candidate(self, pieces: list[str], left: int, right: int) -> Iterator[tuple[float, int, int, str]]:
        merged = pieces[left] + pieces[right]
        token = self._ids.get(merged)
        if token is not None:
            yield -self._scores[token], left, right, merged

    def _pieces_to_ids(self, pieces: list[str]) -> Iterator[int]:
        for piece in pieces:
            token = self._ids.get(piece)
            if token is not None:
                yield token
            else:
                yield from (self._byte_ids[byte] for byte in _utf8(piece) if self._byte_ids[byte] >= 0)


def _utf8(piece: str) -> bytes:
    """The bytes of one character: of a lone surrogate U+DC80..U+DCFF the byte it stands for, of any other U+FFFD."""
    try:
        return piece.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "\ufffd".encode()


def _byte_ids(tokens: Sequence[str], byte_tokens: Sequence[int], ids: dict[str, int], unknown: int | None) -> list[int]:
    """The token of every byte; where there is none, that of the character or the unknown token; -1 for nothing."""
    fallback = -1 if unknown is None else unknown
    table = [ids.get(chr(byte), fallback) if byte < 128 else fallback for byte in range(256)]
    for token in byte_tokens:
        match = BYTE_TOKEN.match(tokens[token])
        if match:
            table[int(match[1], 16)] = token
    return table


def _word_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Words: runs that end before a space mark, unless some piece of the vocabulary holds that character and a mark."""
    glued = {METASPACE}
    for token in tokens:
        at = token.rfind(METASPACE)
        while at > 0:
            glued.add(token[at - 1])
            at = token.rfind(METASPACE, 0, at)
    inside = "".join(map(re.escape, sorted(glued)))
    # A mark continues the word only after a glued character.
    return re.compile(f"(?:.(?:(?<=[{inside}]){METASPACE})*)(?:[^{METASPACE}]|(?<=[{inside}]){METASPACE})*", re.DOTALL)
