"""Byte-level byte-pair encoding, as GGUF files store it, on the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE

from ..errors import TextError
from .literals import Literals
from .tables import Pretokenizer
from .unicode import well_formed
from .unlocked import encode

__all__ = ["ByteBPE"]

_CONTROL_TYPES = (2, 3)
_USER_DEFINED = 4


class ByteBPE:
    """A `Backend`. Control tokens are no part of the engine's vocabulary, so no run of merges can produce one."""

    def __init__(
        self, tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], rules: Pretokenizer, where: str
    ) -> None:
        special = [token for token, kind in enumerate(types[: len(tokens)]) if kind in _CONTROL_TYPES]
        always = {tokens[token]: token for token, kind in enumerate(types[: len(tokens)]) if kind == _USER_DEFINED}
        control = {tokens[token]: token for token in special}
        vocab = {text: token for token, text in enumerate(tokens)}
        for text in control:
            vocab.pop(text, None)
        self._literals = Literals(control, always)
        self._engine = _engine(_model(vocab, merges, control, rules, where), rules)

    def encode(self, text: str, trusted: Sequence[tuple[int, int]]) -> list[int]:
        """See `Backend.encode`; bytes that are not UTF-8 count as U+FFFD."""
        ids: list[int] = []
        for part in self._literals.cut(text, trusted):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += encode(self._engine, well_formed(part))
        return ids


def _model(
    vocab: dict[str, int], merges: Sequence[str], control: Mapping[str, int], rules: Pretokenizer, where: str
) -> BPE:
    def built(pairs: list[tuple[str, str]]) -> BPE:
        # The typed constructor is twice as quick as handing over JSON.
        return BPE(vocab, pairs, ignore_merges=rules.ignore_merges)

    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    try:
        return built(pairs)
    except Exception:  # so it is for merges of control tokens, which are rare
        try:
            return built([pair for pair in pairs if control.keys().isdisjoint((*pair, "".join(pair)))])
        except Exception as error:
            reason = error
    raise TextError(
        f"the BPE merges do not fit the vocabulary: {reason}", where=where, fix="fetch or convert the file again"
    )


def _engine(model: BPE, rules: Pretokenizer) -> Engine:
    engine = Engine(model)
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in rules.splits]
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return engine
