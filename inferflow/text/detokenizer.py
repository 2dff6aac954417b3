"""Incremental decoding: one token in, the text that is certain out, in constant time a token.

The pieces put together are, byte for byte, `Tokenizer.decode` of all the ids at once: a character whose bytes are spread
over several tokens comes when its last byte does, and bytes that are no UTF-8 become U+FFFD as in
``bytes.decode(errors="replace")``.
"""

from __future__ import annotations

import codecs

from .tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """One stream of tokens. With `continuation` the text goes on from an earlier one: its first space stays, where a
    vocabulary's rule would take it off from the beginning of a text."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, *, continuation: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._strip_first = tokenizer.strips_leading_space and not continuation
        self._strip = self._strip_first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty. TextError for a negative id."""
        if token in self._skipped:
            return ""
        piece = self._tokenizer.piece(token)
        if self._strip and piece:
            self._strip = False
            if piece[:1] == b" ":
                piece = piece[1:]
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What an unfinished character leaves (U+FFFD, or nothing); the next `push` begins a new text."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        self._strip = self._strip_first
        return rest
