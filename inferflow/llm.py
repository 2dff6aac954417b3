"""`LLM`: the Python surface. Text or ids in, text, logits or any named tensor out.

from inferflow import LLM, SamplingParams
llm = LLM()                                    # the demo model; or a directory, a .gguf, "org/name", "pypi:package"
print(llm.generate("The capital of France is", SamplingParams(max_tokens=16)).text)
"""

from __future__ import annotations

import operator
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np

from .errors import ArgumentError, InferflowError, TextError, did_you_mean
from .kernels import native
from .runtime.engine import Engine, Event, Options
from .runtime.engine import Sequence as Running
from .runtime.executor import Executor, ReferenceExecutor
from .runtime.model import Model, context_length, load_model
from .runtime.sampler import SamplingParams
from .spec.expression import show
from .text import Detokenizer, StopMatcher, Tokenizer, encode_chat, load_tokenizer
from .weights.locate import locate

__all__ = ["LLM", "Chunk", "Completion"]

DEFAULT_LENGTH = 8192
ENGINES = ("native", "reference")
Prompt = str | Sequence[int]


def choose_engine(asked: str | None) -> str:
    """The engine's name; for None the native one, or a warning where it was not built."""
    if asked is not None:
        _one_of("engine", "engine", asked, ENGINES)
    elif not native.available():
        warnings.warn(
            "the native engine was not built; the NumPy reference, which is slow, takes its place", stacklevel=3
        )
        return "reference"
    return asked or "native"


@dataclass(frozen=True)
class Completion:
    """An answer. `finish` is ``stop`` (an end token, or `stop_string`) or ``length``; `ids` are the new tokens."""

    text: str
    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish: str
    stop_string: str | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: the text that became certain with `token`; `finish` is set on the last one."""

    text: str
    token: int | None
    finish: str | None = None
    stop_string: str | None = None


class LLM:
    """A model in this process; use as a context manager to close its files. Threads may share it: they take turns, step by
    step, and what they run is batched together. A child that the process forks may go on using it.

    `model`: a directory, a ``.gguf``/``.safetensors``/``.bin`` file, ``org/name[:QUANT]``, ``pypi:PACKAGE[==VERSION]``, or
    None for the demo model. `spec`: a shipped spec's name or a ``.toml`` file; None finds it by the model's own config.
    `config` overrides keys of the model's config. `max_model_len` bounds prompt and answer together (default: what the model
    was made for, at most 8192).

    `engine`: ``native`` (C++; the default where it was built) or ``reference`` (NumPy, the definition). `threads`: of the
    native engine (default: the processors that this process may use). `kv`: the type of its cache, ``f32``, ``f16``, ``bf16``
    or ``int8``; ``auto`` is f32 for a model with f32 matrices and f16 for others. `isa`: an instruction set of
    `inferflow.kernels.native.isas`, instead of the best. `quant`: the formats in which matrices are held,
    ``"q3.5,output=q4"`` (`inferflow.weights.choice`); None as the file has them. Raises FetchError, CheckpointError,
    SpecError, ArgumentError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        spec: str | Path | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        engine: str | None = None,
        threads: int | None = None,
        kv: str = "auto",
        isa: str | None = None,
        quant: str | Mapping[str, str] | None = None,
        token_budget: int = 512,
        offline: bool = False,
    ) -> None:
        self.engine_name = choose_engine(engine)
        _whole("token_budget", token_budget)
        _check_execution(threads, kv, isa)
        if max_model_len is not None:
            _whole("max_model_len", max_model_len)
        if config is not None and not isinstance(config, Mapping):
            raise ArgumentError(f"it is {show(config)}", where="config", fix="pass a dict of the config's keys")
        self._lock = threading.RLock()  # around the engine
        self._closed = self._interrupted = False  # interrupted: the process was forked in the midst of a step
        self.path = locate(None if model is None else str(model), offline=offline)
        self.model: Model = load_model(self.path, spec, config, quant)
        self.tokenizer: Tokenizer | None = load_tokenizer(self.model.source, self.path)
        self.max_model_len = self._length(max_model_len)
        self._engine = Engine(
            self.model.graph,
            self.executor(threads, kv, isa),
            max_len=self.max_model_len,
            eos=self.eos_ids,
            options=Options(budget=token_budget),
        )
        _LIVING.add(self)

    def executor(self, threads: int | None = None, kv: str = "auto", isa: str | None = None) -> Executor:
        """A new executor of this model, for an `Engine` of one's own. Raises ArgumentError."""
        _check_execution(threads, kv, isa)
        if self.engine_name == "reference":
            return ReferenceExecutor(self.model.graph, self.model.weights)
        from .runtime.native import NativeExecutor, cache_type

        graph, weights = self.model.graph, self.model.weights
        return NativeExecutor(graph, weights, threads=threads, kv=cache_type(kv, graph, weights), isa=isa)

    def _length(self, asked: int | None) -> int:
        made_for, limit = context_length(self.model)
        if asked is not None and limit is not None and asked > limit:
            reason = f"it is {asked}, and the model has a table of {limit} positions"
            raise ArgumentError(reason, where="max_model_len", fix=f"it can be at most {limit}")
        return asked or min(n for n in (made_for, limit, DEFAULT_LENGTH) if n is not None)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer: the union of what the model's files declare."""
        if self.tokenizer is not None:
            return self.tokenizer.eos_ids
        generation = self.model.config.get("generation")
        tables = [self.model.config, generation if isinstance(generation, Mapping) else {}]
        declared = [table.get("eos_token_id") for table in tables]
        flat = [i for d in declared for i in (d if isinstance(d, list) else [d])]
        return frozenset(i for i in flat if isinstance(i, int))

    # ------------------------------------------------------------------ generation

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> list[Completion]: ...
    def generate(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> Completion | list[Completion]:
        """Answer one prompt (a str: one Completion) or several (a list of str or of token ids: a list), batched together.

        `options` are fields of SamplingParams, instead of `params`.
        """
        sampling = _sampling(params, options)
        if isinstance(prompts, str):
            return self._complete([prompts], sampling)[0]
        return self._complete(_items(prompts), sampling)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Chunk]:
        """The answer as it comes. The texts, put together, are `generate`'s. Closing the iterator stops the work."""
        sampling = _sampling(params, options)
        return self._stream(self._ids(prompt), sampling)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Answer a conversation, ``[{"role": "user", "content": "…"}, …]``, by the model's own chat template."""
        return self._complete([self.chat_ids(messages)], _sampling(params, options))[0]

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with what the model declares around it (BOS)."""
        return self._need_tokenizer().encode(text)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids of a conversation, ready for the answer. What users wrote never becomes a control token."""
        return encode_chat(self._need_tokenizer(), messages)

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[Chunk]:
        answer = self._start(ids, params, 0)
        try:
            yield from self._run([answer])
        finally:
            self._abort(answer)

    def _complete(self, prompts: list[Prompt], params: SamplingParams) -> list[Completion]:
        all_ids = [self._ids(p) for p in prompts]
        answers: list[_Answer] = []
        try:
            for n, ids in enumerate(all_ids):
                answers.append(self._start(ids, params, n))
            for _ in self._run(answers):
                pass
        finally:
            for answer in answers:
                self._abort(answer)
        return [a.completion() for a in answers]

    def _start(self, ids: list[int], params: SamplingParams, index: int) -> _Answer:
        with self._lock:
            return _Answer(self._open().add(ids, params, index), self.tokenizer, self.eos_ids)

    def _abort(self, answer: _Answer) -> None:
        with self._lock:
            self._engine.abort(answer.sequence)

    def _run(self, answers: Sequence[_Answer]) -> Iterator[Chunk]:
        """The chunks of `answers` until all have ended. Whoever finds no news steps the engine for everybody: the events of
        other streams and threads wait in their sequences' inboxes."""
        live = list(answers)
        while live:
            with self._lock:
                if not any(answer.sequence.inbox for answer in live):
                    for event in self._open().step():
                        event.sequence.inbox.append(event)
            for answer in live:
                while answer.sequence.inbox and answer.finish is None:
                    chunk = answer.take(answer.sequence.inbox.popleft())
                    if answer.finish is not None:
                        self._abort(answer)
                    yield chunk
            live = [answer for answer in live if answer.finish is None]

    def _open(self) -> Engine:
        if self._closed:
            raise ArgumentError("the model is closed", where=str(self.path), fix="use it inside its 'with' block")
        if self._interrupted:
            self._engine = self._engine.again()
            self._interrupted = False
        return self._engine

    def _forked(self) -> None:
        """In a forked child, where this thread is the only one. If another was in the midst of a step, nobody will ever finish
        it nor let go of the lock: what ran is told so, and the next call makes the engine anew."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        self._lock = threading.RLock()
        self._interrupted = True
        engine = self._engine
        error = InferflowError(
            "the process was forked in the midst of a step", where="fork", fix="ask again in the child"
        )
        for sequence in (*engine.waiting, *engine.running):
            sequence.inbox.append(Event(sequence, None, "error", error))
            sequence.finish = "error"
        engine.waiting.clear()
        engine.running.clear()

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        ids = _items(prompt)
        for item in ids:
            if not isinstance(item, int | np.integer) or isinstance(item, bool):
                raise _no_prompt(item)
        return [int(i) for i in ids]

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            fix = "add its tokenizer.json, or pass token ids"
            raise TextError("the model has no tokenizer", where=str(self.path), fix=fix)
        return self.tokenizer

    # ------------------------------------------------------------------ research

    def logits(self, ids: Sequence[int], *, chunk: int | None = None, positions: slice = slice(None)) -> np.ndarray:
        """Next-token logits at `positions` (all of them, unless it says which), float32 [positions, vocab]. `chunk` runs so
        many tokens at a time, through the cache: the answer is the same to the last bit."""
        numbers = self._ids(ids)
        if chunk is not None:
            _whole("chunk", chunk)
        chosen = _forwards(positions)
        with self._lock:
            return self._open().forward(numbers, chunk=chunk, positions=chosen)["logits"]

    def forward(self, ids: Sequence[int], capture: Sequence[str]) -> dict[str, np.ndarray]:
        """The named tensors of a run over `ids`, float32, first axis the tokens: ``["layers.3.attn_norm", "logits"]``.

        `tensor_names` lists the names. Raises ArgumentError for one that is not there.
        """
        names = self.model.graph.names
        if isinstance(capture, str) or not isinstance(capture, Iterable):
            raise ArgumentError(f"it is {show(capture)}", where="capture", fix='pass a list: ["logits"]')
        for name in (wanted := list[Any](capture)):
            if not isinstance(name, str) or name not in names:
                said, close = (f"'{name}'", did_you_mean(name, names)) if isinstance(name, str) else (show(name), "")
                raise ArgumentError(f"there is no tensor {said}", where="capture", fix=close or "see llm.tensor_names")
        numbers = self._ids(ids)
        with self._lock:
            return self._open().forward(numbers, wanted)

    @property
    def engine(self) -> Engine:
        """The step loop, for measuring it. It is not thread-safe: nothing else may use the model meanwhile."""
        return self._open()

    @property
    def tensor_names(self) -> list[str]:
        """Every name that `forward` can capture."""
        return list(self.model.graph.names)

    def close(self) -> None:
        """Close the model's files. Answers that are still running end with an ArgumentError."""
        with self._lock:
            self._closed = True
            self.model.source.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Answer:
    """One sequence on its way to text: detokeniser and stop strings."""

    def __init__(self, sequence: Running, tokenizer: Tokenizer | None, eos: Collection[int]) -> None:
        self.sequence = sequence
        self.eos = eos
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer, continuation=True)
        self.stops = StopMatcher(list(sequence.params.stop))
        self.stop_ids = _control_stops(sequence.params.stop, tokenizer)
        self.ids: list[int] = []  # the sequence may run ahead of what was taken
        self.pieces: list[str] = []
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
        return Chunk(text, event.token, self.finish, self.matched)

    def completion(self) -> Completion:
        prompt = tuple(self.sequence.ids[: self.sequence.prompt])
        return Completion("".join(self.pieces), tuple(self.ids), prompt, self.finish or "length", self.matched)


def _control_stops(stops: Iterable[str], tokenizer: Tokenizer | None) -> dict[int, str]:
    """The stop strings that are control tokens, by id: those have no text to be found in."""
    found = {} if tokenizer is None else {tokenizer.token_id(stop): stop for stop in stops}
    return {} if tokenizer is None else {i: stop for i, stop in found.items() if i in tokenizer.special_ids}


def _items(value: Any) -> list[Any]:
    """The elements of what should be a list."""
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise _no_prompt(value)
    return list(value)


def _no_prompt(value: object) -> ArgumentError:
    fix = "pass text, or a list of ints; several prompts are a list of those: [[1, 2], [3]]"
    return ArgumentError(f"{show(value)} is none: a prompt is a str or a list of token ids", where="prompt", fix=fix)


def _whole(name: str, value: object, most: int = 1 << 24) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ArgumentError(f"it is {show(value)}", where=name, fix=f"it must be a whole number from 1 to {most}")


def _one_of(name: str, kind: str, value: object, known: Iterable[str]) -> None:
    words = list(known)
    if not isinstance(value, str) or value not in words:
        close = did_you_mean(value[:100], words) if isinstance(value, str) else ""
        raise ArgumentError(
            f"there is no {kind} {show(value)}", where=name, fix=close or f"use one of {', '.join(words)}"
        )


def _check_execution(threads: object, kv: object, isa: object) -> None:
    """The arguments of `LLM.executor`, for every engine alike."""
    if threads is not None:
        _whole("threads", threads, native.MAX_THREADS)
    _one_of("kv", "cache type", kv, ("auto", *native.CACHE_TYPES))
    if isa is not None and (native.available() or not isinstance(isa, str)):
        _one_of("isa", "instruction set", isa, native.isas() if native.available() else ())


def _forwards(positions: Any) -> slice:
    """`positions`, if it is a slice of whole numbers that goes forwards."""
    try:
        whole = [None if n is None else operator.index(n) for n in (positions.start, positions.stop, positions.step)]
    except (AttributeError, TypeError):
        whole = [0, 0, 0]
    if not isinstance(positions, slice) or (whole[2] is not None and whole[2] < 1):
        raise ArgumentError(f"it is {show(positions)}", where="positions", fix="pass a forward slice: slice(-1, None)")
    return slice(*whole)


def _sampling(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    if params is not None and options:
        raise ArgumentError(
            "give SamplingParams or keywords, not both", where="params", fix="put all in SamplingParams"
        )
    if params is not None:
        if not isinstance(params, SamplingParams):
            raise ArgumentError(f"it is {show(params)}", where="params", fix="pass SamplingParams(…), or keywords")
        return params.one_text()
    known = SamplingParams.__dataclass_fields__
    for name in options:
        if name not in known:
            fix = did_you_mean(name, known) or f"there are {', '.join(known)}"
            raise ArgumentError("there is no such sampling parameter", where=name, fix=fix)
    return SamplingParams(**options).one_text()


_LIVING: weakref.WeakSet[LLM] = weakref.WeakSet()  # for the hook below, which cannot be taken back


def _after_fork() -> None:
    for llm in list(_LIVING):
        llm._forked()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
