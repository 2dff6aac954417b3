"""How the tokens of a `tokenizers` engine become bytes, read from its decoder's own description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Engine

from ..errors import TextError
from .pieces import BYTE_TOKEN, METASPACE, PieceDecoder, decode_byte_level, decode_wordpiece

__all__ = ["decoder_of"]


def decoder_of(engine: Engine, *, where: str) -> tuple[PieceDecoder, bool]:
    """The piece decoder of an engine, and whether the space before a whole text is taken off; TextError if unknown."""
    described: dict[str, Any] | None = json.loads(engine.decoder.__getstate__()) if engine.decoder else None
    steps = _steps(described)
    kinds = [str(step.get("type")) for step in steps]
    if not steps:
        return _spaced, True
    if "ByteLevel" in kinds:
        return decode_byte_level, False
    if "WordPiece" in kinds:
        return decode_wordpiece, True
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _metaspace(steps)
    raise TextError(f"a decoder of {' + '.join(kinds)} is not supported", where=where, fix="use the model's GGUF file")


def _steps(described: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if described is None:
        return []
    if described.get("type") == "Sequence":
        return [step for part in described.get("decoders", []) for step in _steps(part)]
    return [described]


def _spaced(text: str) -> bytes:
    """A token of a vocabulary without a decoder: words, joined by spaces."""
    return (" " + text).encode("utf-8", "replace")


def _metaspace(steps: list[Mapping[str, Any]]) -> tuple[PieceDecoder, bool]:
    replacements: list[tuple[str, str]] = []
    byte_tokens = strip = False
    for step in steps:
        kind = step.get("type")
        if kind == "Replace":
            pattern = step.get("pattern")
            text = pattern.get("String") if isinstance(pattern, Mapping) else None
            if isinstance(text, str):
                replacements.append((text, str(step.get("content", ""))))
        elif kind == "Metaspace":
            replacements.append((str(step.get("replacement", METASPACE)), " "))
            strip = strip or step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip":
            strip = strip or (step.get("content") == " " and int(step.get("start", 0)) > 0)
        elif kind == "ByteFallback":
            byte_tokens = True

    def decode(text: str) -> bytes:
        match = BYTE_TOKEN.match(text) if byte_tokens else None
        if match:
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            text = text.replace(old, new)
        return text.encode("utf-8", "replace")

    return decode, strip
