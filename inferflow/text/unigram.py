"""SentencePiece's unigram model, as GGUF files store it, on the `tokenizers` library."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from tokenizers import Regex, normalizers
from tokenizers.models import Unigram

from ..errors import TextError
from .literals import Literals
from .pieces import METASPACE
from .unicode import well_formed

__all__ = ["UnigramPieces"]

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6


class UnigramPieces:
    """A `Backend`. Control and byte tokens have unguessable names in the engine, so that no text can spell them.

    `charsmap` is SentencePiece's compiled normalisation, empty for none; `squeeze` makes runs of spaces one and takes
    them off both ends; `add_space` puts one before the text.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        types: Sequence[int],
        unknown: int,
        *,
        charsmap: bytes,
        squeeze: bool,
        add_space: bool,
        where: str,
    ) -> None:
        nonce = secrets.token_hex(16)
        hidden = (_UNKNOWN, _CONTROL, _BYTE)
        pieces = [
            (f"\x00{nonce}{token}" if kind in hidden else text, 0.0 if kind == _USER_DEFINED else float(score))
            for token, (text, score, kind) in enumerate(zip(tokens, scores, types, strict=False))
        ]
        control = {
            tokens[token]: token for token, kind in enumerate(types[: len(tokens)]) if kind in (_UNKNOWN, _CONTROL)
        }
        always = {tokens[token]: token for token, kind in enumerate(types[: len(tokens)]) if kind == _USER_DEFINED}
        self._literals = Literals(control, always)
        self._add_space = add_space
        try:
            self._model = Unigram(pieces, unk_id=unknown, byte_fallback=False)
            self._normalizer = _normalizer(charsmap, squeeze)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are no `Exception`
            raise TextError(f"the unigram vocabulary is broken: {error}", where=where, fix="convert it again") from None

    def encode(self, text: str, trusted: Sequence[tuple[int, int]]) -> list[int]:
        """See `Backend.encode`; bytes that are not UTF-8 count as U+FFFD."""
        ids: list[int] = []
        for part in self._literals.cut(text, trusted):
            if isinstance(part, int):
                ids.append(part)
                continue
            plain = self._normalizer.normalize_str(well_formed(part))
            if plain and self._add_space:
                plain = METASPACE + plain
            if plain:
                ids.extend(token.id for token in self._model.tokenize(plain))
        return ids


def _normalizer(charsmap: bytes, squeeze: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if squeeze:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("^ | $"), "")]
    return normalizers.Sequence([*steps, normalizers.Replace(" ", METASPACE)])
