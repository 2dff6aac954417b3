"""Answers: what a request gives, whole (`Completion`) or as it comes (`Chunk`), made of the engine's events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from .runtime.beam import Beam
from .runtime.engine import Event
from .runtime.engine import Sequence as Running
from .text import Detokenizer, StopMatcher, Tokenizer

__all__ = ["Answers", "Choice", "Chunk", "Completion", "Timings", "TokenLogprob"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log-probability, of the model's own distribution, and the likeliest tokens at its place with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Choice:
    """One answer. `finish` is ``stop`` (an end token, or `stop_string`), ``length``, or ``abort`` for what was stopped;
    `ids` are the new tokens; `logprobs` theirs, where the request asks for them; `score` a beam's."""

    index: int
    text: str
    ids: tuple[int, ...]
    finish: str
    stop_string: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    score: float | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds: in the queue, from there to the first token, and from the first token to the last."""

    queued: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Completion:
    """The answers to one prompt, `SamplingParams.n` of them; `text` and the like are the first one's.

    `cached_tokens`: tokens of the prompt that were not computed, since an earlier one began with them. `prompt_logprobs`: of
    each token of the prompt (the first has none), where the request asks for them. Two are equal where the answers are.
    """

    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    cached_tokens: int = field(compare=False)
    timings: Timings = field(compare=False)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def ids(self) -> tuple[int, ...]:
        return self.choices[0].ids

    @property
    def finish(self) -> str:
        return self.choices[0].finish

    @property
    def stop_string(self) -> str | None:
        return self.choices[0].stop_string

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: the text that became certain with `token`; `finish` is set on the last one of choice
    `index`."""

    text: str
    token: int
    finish: str | None = None
    stop_string: str | None = None
    index: int = 0
    logprob: TokenLogprob | None = None


class Answers:
    """A request on its way: the sequences of its choices, and what their events have told so far."""

    def __init__(self, sequences: Sequence[Running], tokenizer: Tokenizer | None, eos: Collection[int]) -> None:
        self.sequences = list(sequences)
        self._tokenizer, self._eos = tokenizer, eos
        self._choices = {one: _Answer(n, one, tokenizer, eos) for n, one in enumerate(sequences)}

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self.sequences[0].ids[: self.sequences[0].prompt])

    def take(self, event: Event) -> Chunk:
        """The text that the event of one of its sequences makes certain. Raises the event's error."""
        return self._choices[event.sequence].take(event)

    def completion(self) -> Completion:
        first = self.sequences[0]
        scored = first.prompt_logprobs
        told = None if scored is None else (None, *(TokenLogprob(*one) for one in scored))
        return Completion(
            self.prompt_ids, tuple(c.choice() for c in self._choices.values()), first.cached or 0, self.timings, told
        )

    def ranked(self, beams: Sequence[Beam]) -> Completion:
        """The completion whose choices are `beams`, found by a search that began with the first sequence."""
        choices = []
        for index, beam in enumerate(beams):
            ended = beam.tokens[-1] in self._eos
            text = self._text(beam.tokens[:-1] if ended else beam.tokens)
            choices.append(Choice(index, text, beam.tokens, "stop" if ended else "length", score=beam.score))
        first = self.sequences[0]
        return Completion(self.prompt_ids, tuple(choices), first.cached or 0, self.timings)

    def _text(self, ids: Iterable[int]) -> str:
        if self._tokenizer is None:
            return ""
        detokenizer = Detokenizer(self._tokenizer, continuation=True)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    @property
    def timings(self) -> Timings:
        """So far; a part that has not begun is 0."""
        first = self.sequences[0]
        started = first.arrived if first.started is None else first.started
        token = started if first.first is None else first.first
        last = max((s.latest for s in self.sequences if s.latest is not None), default=token)
        return Timings(started - first.arrived, token - started, last - token)


class _Answer:
    """One sequence on its way to text: detokeniser and stop strings."""

    def __init__(self, index: int, sequence: Running, tokenizer: Tokenizer | None, eos: Collection[int]) -> None:
        self.index = index
        self.sequence = sequence
        self.eos = eos
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer, continuation=True)
        self.stops = StopMatcher(list(sequence.params.stop))
        self.stop_ids = _control_stops(sequence.params.stop, tokenizer)
        self.ids: list[int] = []  # the sequence's own may be ahead of what was taken
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: str | None = None
        self.matched: str | None = None

    def take(self, event: Event) -> Chunk:
        """The text that `event` makes certain. Raises the event's error."""
        if event.error is not None or event.token is None:
            raise event.error or AssertionError("an event without a token has an error")
        self.ids.append(event.token)
        text = ""
        if self.detokenizer is not None and not (event.token in self.eos and event.finish == "stop"):
            text = self.detokenizer.push(event.token)
        control = self.stop_ids.get(event.token)
        if (event.finish is not None or control is not None) and self.detokenizer is not None:
            text += self.detokenizer.flush()
        text = self.stops.feed(text)
        self.matched = self.stops.matched or control
        self.finish = event.finish if self.matched is None else "stop"
        if self.finish is not None and self.stops.matched is None:
            text += self.stops.flush()
        self.pieces.append(text)
        logprob = None if event.logprob is None else TokenLogprob(event.token, event.logprob, event.top)
        if logprob is not None:
            self.logprobs.append(logprob)
        return Chunk(text, event.token, self.finish, self.matched, self.index, logprob)

    def choice(self) -> Choice:
        asked = self.sequence.params.logprobs is not None
        told = tuple(self.logprobs) if asked else None
        return Choice(self.index, "".join(self.pieces), tuple(self.ids), self.finish or "abort", self.matched, told)


def _control_stops(stops: Iterable[str], tokenizer: Tokenizer | None) -> dict[int, str]:
    """The stop strings that are control tokens, by id: those have no text to be found in."""
    found = {} if tokenizer is None else {tokenizer.token_id(stop): stop for stop in stops}
    return {} if tokenizer is None else {i: stop for i, stop in found.items() if i in tokenizer.special_ids}
