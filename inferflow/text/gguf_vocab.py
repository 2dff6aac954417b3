"""A `Tokenizer` from GGUF metadata (the ``tokenizer.*`` keys of the GGUF specification).

The vocabulary is validated before it is used: array lengths agree, ids lie in range, texts are strings. The algorithm
is chosen by ``tokenizer.ggml.model``: byte-level BPE, SentencePiece merges, unigram, or WordPiece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import TextError
from .pieces import PieceDecoder, decode_byte_level, decode_metaspace
from .tables import pretokenizer as find_pretokenizer
from .tables import tokenizer_kind, turn_enders
from .tokenizer import Backend, Tokenizer, Vocabulary

__all__ = ["GGUFVocabulary", "load_gguf"]

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(6)
_PREFIX = "tokenizer.ggml."


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
        return TextError(
            f"{_PREFIX}{key} {reason}", where=self.where, fix="the file is corrupt: fetch or convert it again"
        )

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
        token = int(value)
        return token if 0 <= token < len(self.tokens) else None

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
        if any(not isinstance(value, str) for value in values):
            raise self._broken(key, "holds something other than strings")
        return values

    def of_type(self, *types: int) -> frozenset[int]:
        wanted = frozenset(types)
        return frozenset(token for token, kind in enumerate(self.types[: len(self.tokens)]) if kind in wanted)


def load_gguf(metadata: Mapping[str, Any], *, where: str, pretokenizer: str | None = None) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes; TextError where it is broken or unknown."""
    vocabulary = GGUFVocabulary(metadata, where)
    builders = {"byte-bpe": _byte_bpe, "sentencepiece": _sentencepiece}
    build = builders.get(vocabulary.kind)
    if build is None:
        raise TextError(f"a {vocabulary.kind} vocabulary in a GGUF file is not supported", where=where)
    return build(vocabulary, pretokenizer)


def _byte_bpe(vocabulary: GGUFVocabulary, override: str | None) -> Tokenizer:
    from .byte_bpe import ByteBPE

    name = override or str(vocabulary.get("pre", "default"))
    rules = find_pretokenizer(name, where=vocabulary.where)
    backend = ByteBPE(vocabulary.tokens, vocabulary.strings("merges"), vocabulary.types, rules, vocabulary.where)
    return _finish(vocabulary, backend, decode_byte_level, add_bos=rules.add_bos, add_space=False)


def _sentencepiece(vocabulary: GGUFVocabulary, override: str | None) -> Tokenizer:
    from .sentencepiece import SentencePiece

    scores = vocabulary.array("scores")
    if scores is None or len(scores) < len(vocabulary.tokens):
        raise TextError(
            "tokenizer.ggml.scores is missing or too short", where=vocabulary.where, fix="convert the model again"
        )
    add_space = vocabulary.flag("add_space_prefix", True)
    backend = SentencePiece(
        vocabulary.tokens, scores, vocabulary.types, add_space, vocabulary.token_id("unknown_token_id", 0)
    )
    return _finish(vocabulary, backend, decode_metaspace, add_bos=True, add_space=add_space)


def _finish(
    vocabulary: GGUFVocabulary, backend: Backend, decode_piece: PieceDecoder, *, add_bos: bool, add_space: bool
) -> Tokenizer:
    sentencepiece = vocabulary.kind == "sentencepiece"
    bos = vocabulary.token_id("bos_token_id", 1 if sentencepiece else None)
    eos = vocabulary.token_id("eos_token_id", 2 if sentencepiece else None)
    control = vocabulary.of_type(CONTROL, UNKNOWN)
    ends = {eos, vocabulary.token_id("eot_token_id"), vocabulary.token_id("eom_token_id")}
    enders = turn_enders()
    ends |= {token for token in vocabulary.of_type(CONTROL) if vocabulary.tokens[token] in enders}
    wants_bos = vocabulary.flag("add_bos_token", add_bos) and bos is not None
    wants_eos = vocabulary.flag("add_eos_token", False) and eos is not None
    template = vocabulary.metadata.get("tokenizer.chat_template")
    names = {
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": vocabulary.token_id("padding_token_id"),
        "unk_token": vocabulary.token_id("unknown_token_id"),
    }
    return Tokenizer(
        Vocabulary(
            tokens=vocabulary.tokens,
            decode_piece=decode_piece,
            control=control,
            literal=vocabulary.of_type(CONTROL, UNKNOWN, USER_DEFINED),
            silent=vocabulary.of_type(UNDEFINED, UNUSED),
            bos_id=bos,
            eos_ids=frozenset(token for token in ends if token is not None),
            prefix=(bos,) if wants_bos and bos is not None else (),
            suffix=(eos,) if wants_eos and eos is not None else (),
            strip_leading_space=add_space,
            chat_template=template if isinstance(template, str) else None,
            names={name: vocabulary.tokens[token] for name, token in names.items() if token is not None},
        ),
        backend,
    )
