"""`Tokenizer`: text to token ids and back, the same for every file format; `load_tokenizer` builds one from a model.

The promise to users of `encode`: text never becomes a control token unless `parse_special` says so. Ids equal those of
the reference implementation of the format (`transformers` for directories, the GGUF reference for ``.gguf``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..errors import TextError
from .literals import Words
from .pieces import PieceDecoder

__all__ = ["Backend", "Span", "Tokenizer", "Vocabulary", "load_tokenizer"]

Span = tuple[int, int]
"""A range of characters, end excluded."""


class Backend(Protocol):
    """The algorithm behind a tokenizer."""

    def encode(self, text: str, trusted: Sequence[Span]) -> list[int]:
        """Ids of `text`, nothing added. Control tokens are recognised only wholly inside a span of `trusted` (sorted,
        disjoint). Bytes that are not UTF-8 arrive as lone surrogates U+DC80..U+DCFF."""
        ...


@dataclass(frozen=True)
class Vocabulary:
    """What a model's files say about its tokens.

    `tokens[id]` is a token's text as stored; `decode_piece` turns it into bytes; `literal` are the ids whose text is
    taken as it is; `control` those that no user text may produce and that decoding skips; `silent` those without text.
    `prefix` and `suffix` are what the model wants around a whole text (BOS, EOS and the like).
    """

    tokens: Sequence[str]
    decode_piece: PieceDecoder
    control: frozenset[int] = frozenset()
    literal: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    strip_leading_space: bool = False
    chat_template: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Encodes and decodes text. Immutable as its user sees it, and safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary, backend: Backend) -> None:
        self._vocabulary = vocabulary
        self._backend = backend
        self.bos_id: int | None = vocabulary.bos_id
        self.eos_ids: frozenset[int] = vocabulary.eos_ids
        self.special_ids: frozenset[int] = vocabulary.control
        self.vocab_size: int = len(vocabulary.tokens)
        self.chat_template: str | None = vocabulary.chat_template
        self.strips_leading_space: bool = vocabulary.strip_leading_space
        self._pieces: dict[int, bytes] = {}

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts that chat templates may name: ``bos_token``, ``eos_token``, ``pad_token`` … where declared."""
        return self._vocabulary.names

    def encode(self, text: str | bytes, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        `add_bos`: None does what the model declares (BOS, and EOS too where declared), True puts BOS first, False adds
        nothing. BOS is never doubled: a text that already begins with it (`parse_special`) keeps the one it has.
        `parse_special`: control tokens written in the text are recognised; leave it False for text from users.
        `bytes` that are not UTF-8 count as U+FFFD, or go through byte tokens where the vocabulary has them.
        """
        return self.encode_spans(text, [(0, len(text))] if parse_special else [], add_bos=add_bos)

    @cached_property
    def control_words(self) -> Words:
        """The texts of the control tokens, in lower case."""
        return Words(self._vocabulary.tokens[token].lower() for token in self.special_ids)

    def encode_spans(
        self, text: str | bytes, trusted: Sequence[Span], *, add_bos: bool | None = None, suffix: bool = True
    ) -> list[int]:
        """As `encode`, control tokens being recognised only wholly inside a span of `trusted` (sorted, disjoint);
        without `suffix` a text goes on: what the model declares for its end is left out."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        ids = self._backend.encode(text, trusted)
        if add_bos is None:
            return [*self._missing_prefix(ids), *ids, *(self._vocabulary.suffix if suffix else ())]
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise TextError("the model has no BOS token", fix="leave add_bos out, or pass add_bos=False")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def _missing_prefix(self, ids: list[int]) -> tuple[int, ...]:
        prefix = self._vocabulary.prefix
        return () if prefix and tuple(ids[: len(prefix)]) == prefix else prefix

    def piece(self, token: int) -> bytes:
        """The exact bytes of a token; empty for an id without text (padding of the vocabulary included)."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._make_piece(token)
        return piece

    def _make_piece(self, token: int) -> bytes:
        vocabulary = self._vocabulary
        if token < 0:
            raise TextError(f"token id {token} is negative", fix="ids count from 0")
        if token >= self.vocab_size or token in vocabulary.silent:
            return b""
        text = vocabulary.tokens[token]
        return text.encode("utf-8", "replace") if token in vocabulary.literal else vocabulary.decode_piece(text)

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = True) -> bytes:
        """The bytes of `ids`, joined; the space that the vocabulary puts before a text is taken off again."""
        skipped = self.special_ids if skip_special else frozenset()
        pieces = [self.piece(token) for token in ids if token not in skipped]
        whole = b"".join(pieces)
        return whole[1:] if self.strips_leading_space and whole[:1] == b" " else whole

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the token stored as `text`, if there is one."""
        return self._ids.get(text)

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {text: token for token, text in reversed(list(enumerate(self._vocabulary.tokens)))}


def load_tokenizer(source: Any, path: str | Path, *, pretokenizer: str | None = None) -> Tokenizer | None:
    """The tokenizer of a model, or None where its files hold none.

    `source` is an opened `Source` (its `metadata` is read where it has a GGUF vocabulary) or None; `path` the model's
    file or directory. `pretokenizer` overrides the name that a GGUF declares. TextError for broken files.
    """
    from .directory import load_directory
    from .gguf_vocab import load_gguf

    metadata: Mapping[str, Any] = getattr(source, "metadata", None) or {}
    builders: list[Callable[[], Tokenizer | None]] = []
    if "tokenizer.ggml.tokens" in metadata:
        builders.append(lambda: load_gguf(metadata, where=str(path), pretokenizer=pretokenizer))
    builders.append(lambda: load_directory(Path(path)))
    for build in builders:
        tokenizer = build()
        if tokenizer is not None:
            return tokenizer
    return None
