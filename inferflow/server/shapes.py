"""The forms of OpenAI's answers: of text completions and of chats, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..answers import Choice, Chunk, Completion, TokenLogprob
from ..text import Detokenizer, Tokenizer

__all__ = ["Chats", "Shape", "TextChoices", "prompt_logprobs", "timings", "usage"]

LOWEST = -9999.0  # JSON has no -inf


class Words:
    """Tokens by name. One that is no whole text is called by its bytes, so that no two look alike."""

    def __init__(self, tokenizer: Tokenizer | None, by_id: bool = False) -> None:
        self.tokenizer = tokenizer
        self.by_id = by_id

    def name(self, token: int) -> str:
        if self.tokenizer is None or self.by_id:
            return f"token_id:{token}"
        piece = self.tokenizer.piece(token)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def bytes(self, token: int) -> list[int] | None:
        """The bytes that `token` adds to a text; None for a control token, which adds none."""
        if self.tokenizer is None or token in self.tokenizer.special_ids:
            return None
        return list(self.tokenizer.piece(token))


def finite(logprob: float) -> float:
    return max(logprob, LOWEST) if logprob == logprob else LOWEST


class Shape(Protocol):
    """`kind` of a whole answer, `chunk_kind` of a streamed one, `prefix` of their ids. `index` is a choice's number among all
    of the answer."""

    kind: str
    chunk_kind: str
    prefix: str

    def choice(self, index: int, choice: Choice, completion: Completion) -> dict[str, Any]: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The streamed choice before the first token, if there is one."""

    def pieces(self, index: int, chunk: Chunk) -> Iterable[dict[str, Any]]:
        """What is streamed of `chunk`."""


@dataclass
class TextChoices:
    """``/v1/completions``. `echo`: the prompts' texts, to be put before the answers, `n` to each; `logprobs`, and
    `scored` for those of the prompts: whether they are asked for."""

    words: Words
    logprobs: bool
    n: int
    echo: Sequence[str] | None = None
    scored: bool = False
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"
    prefix: str = "cmpl-"
    tables: dict[int, LogprobTable] = field(default_factory=dict)  # of the streamed choices

    def choice(self, index: int, choice: Choice, completion: Completion) -> dict[str, Any]:
        text, table = self._echoed(index), None
        if self.logprobs:
            table = LogprobTable(self.words)
            if self.echo is not None:
                table.prompt(completion)
            table.add(choice.logprobs or ())
        made = self._made(index, text + choice.text, table, choice.finish, choice.stop_string)
        scored = completion.prompt_logprobs if self.scored else None
        return made if scored is None else {**made, "prompt_logprobs": prompt_logprobs(scored, self.words)}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._made(index, self._echoed(index), None, None, None) if self.echo is not None else None

    def pieces(self, index: int, chunk: Chunk) -> Iterable[dict[str, Any]]:
        table = None
        if chunk.logprob is not None:
            table = self.tables.setdefault(index, LogprobTable(self.words)).next([chunk.logprob])
        if chunk.text or table is not None or chunk.finish is not None:
            yield self._made(index, chunk.text, table, chunk.finish, chunk.stop_string)

    def _echoed(self, index: int) -> str:
        return "" if self.echo is None else self.echo[index // self.n]

    def _made(
        self, index: int, text: str, table: LogprobTable | None, finish: str | None, stop: str | None
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": index, "text": text, "logprobs": None if table is None else table.json(), "finish_reason": finish
        }  # fmt: skip
        return made if finish is None else {**made, "stop_reason": stop}


class LogprobTable:
    """The logprobs of a text completion: four lists, in step. `text_offset` is where in the choice's text a token's begins."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.offset = 0
        self.text = None if words.tokenizer is None else Detokenizer(words.tokenizer, continuation=True)
        self._empty()

    def _empty(self) -> None:
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def prompt(self, completion: Completion) -> None:
        """The prompt's tokens. The first has no logprob."""
        tokenizer = self.words.tokenizer
        self.text = None if tokenizer is None else Detokenizer(tokenizer)
        for token, scored in zip(completion.prompt_ids, completion.prompt_logprobs or (), strict=True):
            self._add(token, scored)

    def add(self, scored: Iterable[TokenLogprob]) -> LogprobTable:
        for one in scored:
            self._add(one.token, one)
        return self

    def next(self, scored: Iterable[TokenLogprob]) -> LogprobTable:
        """Only these, after all that were added before."""
        self._empty()
        return self.add(scored)

    def _add(self, token: int, scored: TokenLogprob | None) -> None:
        self.tokens.append(self.words.name(token))
        self.text_offset.append(self.offset)
        self.offset += len(self.text.push(token)) if self.text is not None else 0
        self.token_logprobs.append(None if scored is None else finite(scored.logprob))
        self.top_logprobs.append(None if scored is None else self._top(scored))

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in (*scored.top, (scored.token, scored.logprob)):
            found.setdefault(self.words.name(token), finite(logprob))
        return found

    def json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens, "token_logprobs": self.token_logprobs, "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }  # fmt: skip


@dataclass
class Chats:
    """``/v1/chat/completions``."""

    words: Words
    logprobs: bool
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"
    prefix: str = "chatcmpl-"

    def choice(self, index: int, choice: Choice, completion: Completion) -> dict[str, Any]:
        table = self._table(choice.logprobs or ()) if self.logprobs else None
        made = {
            "index": index, "message": {"role": "assistant", "content": choice.text, "refusal": None}, "logprobs": table,
            "finish_reason": choice.finish, "stop_reason": choice.stop_string,
        }  # fmt: skip
        scored = completion.prompt_logprobs
        return made if scored is None else {**made, "prompt_logprobs": prompt_logprobs(scored, self.words)}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._made(index, {"role": "assistant", "content": "", "refusal": None})

    def pieces(self, index: int, chunk: Chunk) -> Iterable[dict[str, Any]]:
        table = None if chunk.logprob is None else self._table([chunk.logprob])
        if chunk.text or table is not None:
            yield self._made(index, {"content": chunk.text}, table)
        if chunk.finish is not None:
            yield {**self._made(index, {}), "finish_reason": chunk.finish, "stop_reason": chunk.stop_string}

    def _made(self, index: int, delta: dict[str, Any], table: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": table, "finish_reason": None}

    def _table(self, scored: Iterable[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**self._entry(one.token, one.logprob), "top_logprobs": [self._entry(*top) for top in one.top]}
            for one in scored
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.words.name(token), "logprob": finite(logprob), "bytes": self.words.bytes(token)}


def prompt_logprobs(scored: Sequence[TokenLogprob | None], words: Words) -> list[dict[str, Any] | None]:
    """As vLLM has them: of each token of the prompt a table of ids."""
    made: list[dict[str, Any] | None] = []
    for one in scored:
        pairs = () if one is None else ((one.token, one.logprob), *one.top)
        table = {str(t): {"logprob": finite(p), "decoded_token": words.name(t)} for t, p in pairs}
        made.append(table or None)
    return made


def usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """Tokens in and out; a prompt counts once, however many answers it has."""
    prompt = sum(len(one.prompt_ids) for one in completions)
    new = sum(len(choice.ids) for one in completions for choice in one.choices)
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in completions)},
    }  # fmt: skip


def timings(completions: Sequence[Completion]) -> dict[str, Any]:
    """Where the time went: milliseconds, the longest of several prompts, which run side by side. Of ``predicted_n`` tokens the
    first one came with the prompt."""
    cached = sum(one.cached_tokens for one in completions)
    new = sum(len(choice.ids) for one in completions for choice in one.choices)
    prompt = sum(len(one.prompt_ids) for one in completions) - cached
    parts = {name: max(getattr(one.timings, name) for one in completions) for name in ("queued", "prefill", "decode")}
    after = new - sum(len(one.choices) for one in completions)
    return {
        "queued_ms": _ms(parts["queued"]), "cache_n": cached, "prompt_n": prompt, "prompt_ms": _ms(parts["prefill"]),
        "predicted_n": new, "predicted_ms": _ms(parts["decode"]),
        "prompt_per_second": _rate(prompt, parts["prefill"]), "predicted_per_second": _rate(after, parts["decode"]),
    }  # fmt: skip


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 2) if seconds > 0 and count > 0 else None
