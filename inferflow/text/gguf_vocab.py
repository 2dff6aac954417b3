"""A `Tokenizer` from GGUF metadata (the ``tokenizer.*`` keys of the GGUF specification).

The vocabulary is validated before it is used: array lengths agree, ids lie in range, texts are strings. The algorithm
is chosen by ``tokenizer.ggml.model``: byte-level BPE, SentencePiece merges, unigram, or WordPiece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TextError
from .pieces import PieceDecoder, decode_byte_level, decode_metaspace
from .tables import pretokenizer as find_pretokenizer
from .tables import tokenizer_kind, turn_enders
from .tokenizer import Backend, Tokenizer, Vocabulary

__all__ = ["GGUFVocabulary", "load_gguf"]

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(6)
_PREFIX = "tokenizer.ggml."
_AGAIN = "the file is corrupt: fetch or convert it again"


class GGUFVocabulary:
    """The checked ``tokenizer.ggml.*`` values; what is absent has the format's default."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.where = where
        self.tokens = self.strings("tokens")
        if not self.tokens:
            raise TextError("the vocabulary is empty", where=where, fix="convert the model again")
        types = self.array("token_type")
        self.types: Sequence[int] = types if types is not None else [NORMAL] * len(self.tokens)
        if len(self.types) < len(self.tokens):
            raise self._broken("token_type", f"has {len(self.types)} entries for {len(self.tokens)} tokens")
        self.kind = tokenizer_kind(str(self.get("model", "")), where=where)

    def _broken(self, key: str, reason: str) -> TextError:
        return TextError(f"{_PREFIX}{key} {reason}", where=self.where, fix=_AGAIN)

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(_PREFIX + key, default)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return default if value is None else bool(value)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """A declared token id, None where absent or outside the vocabulary."""
        value = self.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._broken(key, "is no token id")
        return value if 0 <= value < len(self.tokens) else None

    def scores(self) -> list[float]:
        values = self.array("scores")
        if values is None or len(values) < len(self.tokens):
            raise self._broken("scores", f"has {len(values or ())} entries for {len(self.tokens)} tokens")
        if any(type(value) not in (int, float) or value != value for value in values):
            raise self._broken("scores", "holds something other than numbers")
        return values

    def array(self, key: str) -> list[Any] | None:
        value = self.get(key)
        if value is None:
            return None
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self._broken(key, "is not an array")
        return list(value)

    def strings(self, key: str) -> list[str]:
        values = self.array(key)
        if values is None:
            raise TextError(
                f"{_PREFIX}{key} is missing", where=self.where, fix="use a GGUF file that holds a vocabulary"
            )
        if not {*map(type, values)} <= {str}:
            raise self._broken(key, "holds something other than strings")
        return values

    def of_type(self, *types: int) -> frozenset[int]:
        wanted = frozenset(types)
        return frozenset(token for token, kind in enumerate(self.types[: len(self.tokens)]) if kind in wanted)


@dataclass(frozen=True)
class _Defaults:
    """What holds where the file declares nothing."""

    bos: int | None = None
    eos: int | None = None
    add_bos: bool = False
    add_eos: bool = False


def load_gguf(metadata: Mapping[str, Any], *, where: str, pretokenizer: str | None = None) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes; TextError where it is broken or unknown."""
    vocabulary = GGUFVocabulary(metadata, where)
    builders = {"byte-bpe": _byte_bpe, "sentencepiece": _sentencepiece, "unigram": _unigram}
    build = builders.get(vocabulary.kind)
    if build is None:
        raise TextError(
            f"a {vocabulary.kind} vocabulary in a GGUF file is not supported",
            where=where,
            fix="use the model's directory with its tokenizer.json",
        )
    return build(vocabulary, pretokenizer)


def _byte_bpe(vocabulary: GGUFVocabulary, override: str | None) -> Tokenizer:
    from .byte_bpe import ByteBPE

    name = override or str(vocabulary.get("pre", "default"))
    rules = find_pretokenizer(name, where=vocabulary.where)
    backend = ByteBPE(vocabulary.tokens, vocabulary.strings("merges"), vocabulary.types, rules, vocabulary.where)
    return _finish(vocabulary, backend, decode_byte_level, _Defaults(add_bos=rules.add_bos), add_space=False)


def _sentencepiece(vocabulary: GGUFVocabulary, override: str | None) -> Tokenizer:
    from .sentencepiece import SentencePiece

    add_space = vocabulary.flag("add_space_prefix", True)
    unknown = vocabulary.token_id("unknown_token_id", 0)
    backend = SentencePiece(vocabulary.tokens, vocabulary.scores(), vocabulary.types, add_space, unknown)
    return _finish(vocabulary, backend, decode_metaspace, _Defaults(1, 2, add_bos=True), add_space=add_space)


def _unigram(vocabulary: GGUFVocabulary, override: str | None) -> Tokenizer:
    from .unigram import UnigramPieces

    add_space = vocabulary.flag("add_space_prefix", False)
    charsmap = vocabulary.array("precompiled_charsmap") or []
    if any(not isinstance(value, int) for value in charsmap):
        raise TextError("tokenizer.ggml.precompiled_charsmap holds no bytes", where=vocabulary.where, fix=_AGAIN)
    backend = UnigramPieces(
        vocabulary.tokens,
        vocabulary.scores(),
        vocabulary.types,
        vocabulary.token_id("unknown_token_id", 2) or 0,
        charsmap=bytes(value & 0xFF for value in charsmap),
        squeeze=vocabulary.flag("remove_extra_whitespaces", False),
        add_space=add_space,
        where=vocabulary.where,
    )
    return _finish(vocabulary, backend, decode_metaspace, _Defaults(None, 1, add_eos=True), add_space=add_space)


def _finish(
    vocabulary: GGUFVocabulary, backend: Backend, decode_piece: PieceDecoder, defaults: _Defaults, *, add_space: bool
) -> Tokenizer:
    bos = vocabulary.token_id("bos_token_id", defaults.bos)
    eos = vocabulary.token_id("eos_token_id", defaults.eos)
    wants_bos = vocabulary.flag("add_bos_token", defaults.add_bos)
    wants_eos = vocabulary.flag("add_eos_token", defaults.add_eos)
    template = vocabulary.metadata.get("tokenizer.chat_template")
    names = {"bos_token": bos, "eos_token": eos, "pad_token": vocabulary.token_id("padding_token_id"),
             "unk_token": vocabulary.token_id("unknown_token_id")}  # fmt: skip
    return Tokenizer(
        Vocabulary(
            tokens=vocabulary.tokens,
            decode_piece=decode_piece,
            control=vocabulary.of_type(CONTROL, UNKNOWN),
            literal=vocabulary.of_type(CONTROL, UNKNOWN, USER_DEFINED),
            silent=vocabulary.of_type(UNDEFINED, UNUSED),
            bos_id=bos,
            eos_ids=_ends(vocabulary, eos),
            prefix=(bos,) if wants_bos and bos is not None else (),
            suffix=(eos,) if wants_eos and eos is not None else (),
            strip_leading_space=add_space,
            chat_template=template if isinstance(template, str) else None,
            names={name: vocabulary.tokens[token] for name, token in names.items() if token is not None},
        ),
        backend,
    )


def _ends(vocabulary: GGUFVocabulary, eos: int | None) -> frozenset[int]:
    """The declared ends of text, turn and message, and the turn enders that the vocabulary marks as control tokens."""
    declared = {eos, vocabulary.token_id("eot_token_id"), vocabulary.token_id("eom_token_id")}
    enders = turn_enders()
    marked = {token for token in vocabulary.of_type(CONTROL) if vocabulary.tokens[token] in enders}
    return frozenset(token for token in declared if token is not None) | marked
