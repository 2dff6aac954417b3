"""Structured output: what a JSON schema, a regular expression or a grammar allows next, as a mask over the vocabulary.

The parsing is llguidance's (the extra ``structured``). Compiling lets go of the GIL and takes up to a second for hostile
sources, so it belongs on a thread of its own, before the request is admitted; a step only asks for masks, which are bounded.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from ..errors import ArgumentError, InferflowError, UnsupportedError
from .sampling_params import MAX_SOURCE

__all__ = ["Structure", "StructureCompiler"]

MAX_SECONDS = 0.5
MAX_CACHED = 64
# Work that one grammar and one step may cause, in the library's units: some milliseconds each, for what is not hostile.
LIMITS = {
    "initial_lexer_fuel": 100_000, "step_lexer_fuel": 50_000, "max_lexer_states": 50_000, "max_grammar_size": 100_000,
}  # fmt: skip
JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}  # else a model may go on with spaces for ever


class Structure:
    """A `sampler.Constraint`: one answer on its way through a grammar. End tokens come when the answer is whole."""

    def __init__(self, matcher: Any, kind: str, vocab: int) -> None:
        self._matcher = matcher
        self._kind = kind
        self._vocab = vocab

    def mask(self) -> np.ndarray:
        """bool [vocab], true where a token may come. Raises InferflowError where the grammar becomes too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocab, bitorder="little").view(bool)

    def push(self, token: int) -> None:
        """The answer goes on with `token`. Raises InferflowError for one that the mask forbids."""
        self._matcher.consume_token(token)
        self._check()

    def copy(self) -> Structure:
        """The same place in the grammar, to go on from separately."""
        return Structure(self._matcher.deep_copy(), self._kind, self._vocab)

    def whole(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            fix = "ask for a simpler structure"
            raise InferflowError(_first_line(self._matcher.get_error()), where=self._kind, fix=fix)


class _Tokenizer(Protocol):
    special_ids: frozenset[int]
    vocab_size: int

    def piece(self, token: int) -> bytes: ...

    def encode(self, text: str | bytes, *, add_bos: bool | None = None) -> list[int]: ...


class StructureCompiler:
    """Compiles structures for one tokenizer, and remembers the last ones. Threads may share it.

    `pieces`: the bytes of each token; `special`: those that no text may contain; `ends`: those that end an answer; `encode`:
    ids of a text, nothing added. Raises UnsupportedError without llguidance, or for a model without end tokens.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        special: Collection[int],
        ends: Collection[int],
        encode: Callable[[bytes], list[int]],
    ) -> None:
        self._library = _llguidance()
        if not ends:
            fix = "name one in the model's config (eos_token_id)"
            raise UnsupportedError(
                "the model has no end token, so no structure would end", where="structured output", fix=fix
            )
        source = _Vocabulary(pieces, sorted({*special, *ends}), min(ends), encode)
        wrapped = self._library.TokenizerWrapper(source)
        self._tokenizer = self._library.LLTokenizer(wrapped, n_vocab=len(pieces), eos_token=sorted(ends))
        self._vocab = len(pieces)
        self._lock = threading.Lock()
        self._compiled: dict[tuple[str, str], Structure] = {}  # the last used at the end

    @classmethod
    def of(cls, tokenizer: _Tokenizer, ends: Collection[int]) -> StructureCompiler:
        """The compiler of an `inferflow.text.Tokenizer`, whose answers end with one of `ends`."""
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        return cls(pieces, tokenizer.special_ids, ends, lambda text: tokenizer.encode(text, add_bos=False))

    def compile(self, kind: str, source: str | Mapping[str, Any]) -> Structure:
        """The structure of `SamplingParams.structured`, at its beginning. Raises ArgumentError for a bad one: not well formed,
        too large or too slow, or one that no text has."""
        text = source if isinstance(source, str) else _dumps(source)
        if len(text) > MAX_SOURCE:
            fix = f"it can have {MAX_SOURCE} at most"
            raise ArgumentError(f"it has {len(text)} characters", where=kind, fix=fix)
        with self._lock:
            found = self._compiled.pop((kind, text), None)
        if found is None:
            found = self._build(kind, text)
        with self._lock:
            self._compiled[kind, text] = found
            while len(self._compiled) > MAX_CACHED:
                del self._compiled[next(iter(self._compiled))]
        return found.copy()

    def _build(self, kind: str, text: str) -> Structure:
        start = time.thread_time()  # a busy machine is no reason to refuse
        matcher, limits = self._library.LLMatcher, self._library.LLParserLimits(verbose_errors=False, **LIMITS)
        try:
            if kind == "json_schema":
                grammar = matcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            else:
                grammar = {"regex": matcher.grammar_from_regex, "grammar": matcher.grammar_from_lark}[kind](text)
        except ValueError as error:
            raise _refused(kind, str(error)) from None
        made = matcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if made.is_error():
            raise _refused(kind, made.get_error())
        structure = Structure(made, kind, self._vocab)
        try:
            for _ in range(2):  # the first ones are the slowest: states are made as they are needed, for all copies
                structure.copy().mask()
        except InferflowError as error:
            raise _refused(kind, error.reason) from None
        if made.is_stopped() and not made.is_accepting():
            raise _refused(kind, "no text fits it")
        if (took := time.thread_time() - start) > MAX_SECONDS:
            raise _refused(kind, f"it takes {took:.1f} s of work to compile")
        return structure


class _Vocabulary:
    """A tokenizer as llguidance wants one: it is called with bytes that go on from others, so the space that some vocabularies
    put before a text must not be there."""

    bos_token_id = None

    def __init__(
        self, pieces: Sequence[bytes], special: list[int], eos: int, encode: Callable[[bytes], list[int]]
    ) -> None:
        self.tokens = list(pieces)
        self.special_token_ids = special
        self.eos_token_id = eos
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        ids = self._encode(text)
        if self._text(ids) != text:
            after = self._encode(b"\x02" + text)
            ids = next((after[n:] for n in range(1, len(after)) if self._text(after[n:]) == text), ids)
        return ids

    def _text(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[i] for i in ids)


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        fix = "pip install 'inferflow[structured]'"
        raise UnsupportedError("llguidance is not installed", where="structured output", fix=fix) from None
    return llguidance


def _dumps(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise _refused("json_schema", "it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _refused("json_schema", f"it is no JSON: {error}") from None


def _refused(kind: str, reason: str) -> ArgumentError:
    return ArgumentError(_first_line(reason), where=kind, fix="correct it, or make it simpler")


def _first_line(text: str) -> str:
    """What the library says, without its drawing of the place."""
    lines = text.strip().splitlines() or ["it cannot be compiled"]
    if lines[0].startswith("NoExtension"):
        return "no text fits it"
    why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return why[:300].rstrip(": ")
