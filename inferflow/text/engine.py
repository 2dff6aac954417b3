"""A `Backend` on a ready-made engine of the `tokenizers` library; user text yields no control token.

The engine recognises control tokens anywhere. Where it found one outside trusted text (rare: hostile or quoted text),
the text is encoded again by a second engine, the same but for its control tokens, which have unguessable names there;
trusted control tokens are written by those names. The second engine is built when first needed.
"""

from __future__ import annotations

import json
import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Engine

from .literals import Literals
from .unicode import well_formed
from .unlocked import encode

__all__ = ["EngineBackend"]

Span = tuple[int, int]


class EngineBackend:
    """`control` maps the texts of control tokens to ids; `unknown` is the id that unknown characters become."""

    def __init__(self, engine: Engine, control: Mapping[str, int], unknown: int | None) -> None:
        self._engine = engine
        self._control = dict(control)
        self._control_ids = frozenset(control.values())
        self._texts = {token: text for text, token in control.items()}
        self._unknown = unknown
        self._literals = Literals(control, {})
        self._guarded: tuple[Engine, dict[int, str]] | None = None

    def encode(self, text: str, trusted: Sequence[Span]) -> list[int]:
        """See `Backend.encode`; bytes that are not UTF-8 count as U+FFFD."""
        text = well_formed(text)
        ids = encode(self._engine, text)
        if self._control_ids.isdisjoint(ids):
            return ids
        encoding = self._engine.encode_batch([text], add_special_tokens=False)[0]
        found = [span for token, span in zip(ids, encoding.offsets, strict=True) if self._was_parsed(token, text, span)]
        return ids if all(_inside(span, trusted) for span in found) else self._encode_guarded(text, trusted)

    def _was_parsed(self, token: int, text: str, span: Span) -> bool:
        if token not in self._control_ids:
            return False
        return token != self._unknown or self._texts[token] in text[span[0] : span[1]]

    def _encode_guarded(self, text: str, trusted: Sequence[Span]) -> list[int]:
        if self._guarded is None:
            self._guarded = _guarded(self._engine, self._control)
        engine, names = self._guarded
        parts = self._literals.cut(text, trusted)
        written = "".join(part if isinstance(part, str) else names[part] for part in parts)
        return encode(engine, written)


def _inside(span: Span, spans: Sequence[Span]) -> bool:
    at = bisect_right(spans, span[0], key=lambda candidate: candidate[0]) - 1
    return at >= 0 and span[1] <= spans[at][1]


def _guarded(engine: Engine, control: Mapping[str, int]) -> tuple[Engine, dict[int, str]]:
    """The engine with other names for its control tokens, and those names by id."""
    nonce = secrets.token_hex(16)
    renamed = {text: f"q{nonce}z{token}q" for text, token in control.items()}
    data: dict[str, Any] = json.loads(engine.to_str())
    data["post_processor"] = None
    for added in data["added_tokens"]:
        added["content"] = renamed.get(added["content"], added["content"])
    model = data["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed.get(text, text): token for text, token in vocabulary.items()}
    else:
        model["vocab"] = [[renamed.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if renamed.keys().isdisjoint((*merge, "".join(merge)))]
    return Engine.from_str(json.dumps(data)), {token: renamed[text] for text, token in control.items()}
