"""`LLM`: the Python surface. Text or ids in, text, logits or any named tensor out.

from inferflow import LLM, SamplingParams
llm = LLM()                                    # the demo model; or a directory, a .gguf, "org/name", "pypi:package"
print(llm.generate("The capital of France is", SamplingParams(max_tokens=16)).text)
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .answers import Answers, Chunk, Completion
from .arguments import (
    Admission,
    Prompt,
    captured,
    check_config,
    check_execution,
    choose_engine,
    forward_slice,
    items,
    request,
    token_ids,
    whole_number,
)
from .errors import ArgumentError, ClosedError, InferflowError, TextError
from .runtime.beam import BeamSearch, next_beams
from .runtime.engine import Engine, Event, Options
from .runtime.engine import Sequence as Running
from .runtime.executor import Executor, ReferenceExecutor
from .runtime.model import Model, context_length, end_tokens, load_model
from .runtime.sampler import Constraint, SamplingParams
from .spec.expression import show
from .text import Tokenizer, encode_chat, load_tokenizer
from .weights.locate import locate

if TYPE_CHECKING:
    from .runtime.structured import StructureCompiler

__all__ = ["LLM"]

DEFAULT_LENGTH = 8192


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
    ``"q3.5,output=q4"`` (`inferflow.weights.choice`); None as the file has them.

    `options`: how the loop batches (`Options`: token budget, policy, queue bounds …). The cache has room for `slots` sequences
    of the greatest length, as far as memory is free; `plan` says how much that is. Raises FetchError, CheckpointError,
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
        options: Options | None = None,
        slots: int = 8,
        offline: bool = False,
    ) -> None:
        self.engine_name = choose_engine(engine)
        whole_number("slots", slots)
        check_execution(threads, kv, isa)
        if max_model_len is not None:
            whole_number("max_model_len", max_model_len)
        if options is not None and not isinstance(options, Options):
            raise ArgumentError(f"it is {show(options)}", where="options", fix="pass Options(…)")
        check_config(config)
        self._queue, self._lock = threading.Lock(), threading.Lock()  # see `turn`
        self._dropped: deque[Running] = deque()
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
            slots=slots,
            options=options,
            vocab=None if self.tokenizer is None else self.tokenizer.vocab_size,
        )
        self.after_fork: list[Callable[[], None]] = []  # called in a forked child
        self.listeners: list[Callable[[list[Event]], None]] = []  # told of each step's events, by the thread that steps
        _LIVING.add(self)

    def executor(self, threads: int | None = None, kv: str = "auto", isa: str | None = None) -> Executor:
        """A new executor of this model, for an `Engine` of one's own. Raises ArgumentError."""
        check_execution(threads, kv, isa)
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
        return end_tokens(self.model.config) if self.tokenizer is None else self.tokenizer.eos_ids

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

        `options` are fields of SamplingParams, instead of `params`, and beside either those of `Admission`: `priority`,
        `timeout` in seconds, `cache_salt`. Raises ArgumentError, TextError, QueueFullError, DeadlineError.
        """
        params, admission = request(params, options)
        if isinstance(prompts, str):
            return self._complete([prompts], params, admission)[0]
        return self._complete(items(prompts), params, admission)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Chunk]:
        """The answer as it comes. The texts, put together, are `generate`'s. Closing the iterator stops the work."""
        params, admission = request(params, options)
        return self._stream(self.prompt_ids(prompt), params, admission)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Answer a conversation, ``[{"role": "user", "content": "…"}, …]``, by the model's own chat template."""
        return self._complete([self.chat_ids(messages)], *request(params, options))[0]

    def beam_search(
        self, prompt: Prompt, width: int = 4, max_tokens: int = 128, *, length_penalty: float = 1.0
    ) -> Completion:
        """The `width` likeliest answers of at most `max_tokens`, the best first; a choice's `score` is its log-probability
        over its length^`length_penalty`. End tokens are part of an answer's ids, and not of its text."""
        ids, search = self.prompt_ids(prompt), BeamSearch(width, self.eos_ids, max_tokens, length_penalty)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=2 * width)
        with self.turn():
            first = self._open().add(ids, params)
        beams, spent = [first], list[Running]()
        try:
            while not search.done:
                self._await_news(beams)
                self.drop(spent)
                events = [beam.inbox.popleft() for beam in beams]
                parents, tokens = search.step([event.told() for event in events])
                with self.turn():
                    beams, spent = next_beams(self._open(), search, beams, events, parents, tokens)
        finally:
            self.drop([*beams, *spent])
        return Answers([first], self.tokenizer, self.eos_ids).ranked(search.answers)

    def _await_news(self, sequences: Sequence[Running]) -> None:
        """Step until there is news of each."""
        while True:
            with self.turn():
                if all(sequence.inbox for sequence in sequences):
                    return
                self.step()

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with what the model declares around it (BOS)."""
        return self._need_tokenizer().encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return self._need_tokenizer().decode(token_ids(ids))

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids of a conversation, ready for the answer. What users wrote never becomes a control token."""
        return encode_chat(self._need_tokenizer(), messages)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt: text is encoded, ids are as they are. Raises ArgumentError for anything else."""
        return self.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)

    def constraints(self, params: SamplingParams) -> list[Constraint | None]:
        """What holds each of the `n` answers to the structure that `params` asks for, if any. Compiling takes up to a second.
        Raises ArgumentError for a bad one, UnsupportedError without the extra ``structured``."""
        if params.structured is None:
            return [None] * params.n
        return [self._structures.compile(*params.structured) for _ in range(params.n)]

    @cached_property
    def _structures(self) -> StructureCompiler:
        from .runtime.structured import StructureCompiler

        return StructureCompiler.of(self._need_tokenizer(), self.eos_ids)

    # ------------------------------------------------------------------ the loop

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The engine for one thread at a time; not to be nested. A lock by itself may go to the same thread over and over,
        which would step while others wait to add what they have: so whoever waits in the queue is next."""
        with self._queue:
            self._lock.acquire()
        try:
            self._sweep()
            yield
        finally:
            self._lock.release()
            self.drop(())

    def drop(self, sequences: Iterable[Running]) -> None:
        """Abort them, wherever they are: now, or after the turn that somebody has. Never waits, so that the garbage collector
        may do it in the midst of anything."""
        self._dropped.extend(sequences)
        # Whoever has the lock now looks here once more after he has let go of it.
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        while self._dropped:
            self._engine.abort(self._dropped.popleft())

    def admit(
        self,
        ids: list[int],
        params: SamplingParams,
        admission: Admission,
        constraints: Sequence[Constraint | None],
        number: int = 0,
        inbox: deque[Event] | None = None,
    ) -> Answers:
        """Queue a prompt, the `number`-th of those with the same seed. The events of all its sequences go to `inbox` (None: one
        of its own). Hold `turn`. Raises ArgumentError, QueueFullError."""
        engine, n = self._open(), params.n
        deadline = None if admission.timeout is None else engine.clock() + admission.timeout
        extras = {} if admission.cache_salt is None else {"cache_salt": admission.cache_salt}
        first = engine.add(
            ids,
            params,
            number * n,
            priority=admission.priority,
            deadline=deadline,
            extras=extras,
            constraint=constraints[0],
        )
        sequences = [first]
        try:
            for k in range(1, n):
                sequences.append(engine.fork(first, number * n + k, constraint=constraints[k]))
        except BaseException:
            for sequence in sequences:
                engine.abort(sequence)
            raise
        for sequence in sequences:
            sequence.inbox = first.inbox if inbox is None else inbox
        return Answers(sequences, self.tokenizer, self.eos_ids)

    def step(self) -> None:
        """One step for everybody: events go to their sequences' inboxes, whoever steps. Hold `turn`."""
        self._deliver(self._open().step())

    def end_all(self, error: InferflowError) -> None:
        """All that runs or waits ends with `error`, and the engine is of no more use. Hold `turn`."""
        self._deliver(self._engine.fail(error))

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            event.sequence.inbox.append(event)
        for listener in self.listeners:
            listener(events)

    def _stream(self, ids: list[int], params: SamplingParams, admission: Admission) -> Iterator[Chunk]:
        constraints = self.constraints(params)
        with self.turn():
            answers = self.admit(ids, params, admission, constraints)
        try:
            yield from self._run([answers], answers.sequences[0].inbox)
        finally:
            self.drop(answers.sequences)

    def _complete(self, prompts: list[Prompt], params: SamplingParams, admission: Admission) -> list[Completion]:
        all_ids = [self.prompt_ids(prompt) for prompt in prompts]
        constraints = [self.constraints(params) for _ in prompts]
        requests, inbox = list[Answers](), deque[Event]()
        try:
            for number, ids in enumerate(all_ids):
                with self.turn():
                    requests.append(self.admit(ids, params, admission, constraints[number], number, inbox))
            for _ in self._run(requests, inbox):
                pass
        finally:
            self.drop(sequence for answers in requests for sequence in answers.sequences)
        return [answers.completion() for answers in requests]

    def _run(self, requests: Sequence[Answers], inbox: deque[Event]) -> Iterator[Chunk]:
        """The chunks of `requests` until all have ended. Whoever finds nothing in his `inbox` steps for everybody."""
        live = {sequence: answers for answers in requests for sequence in answers.sequences}
        while live:
            with self.turn():
                if not inbox:
                    self.step()
            yield from self.take(inbox, live)

    def take(self, inbox: deque[Event], live: dict[Running, Answers]) -> Iterator[Chunk]:
        """The chunks that have come for sequences of `live`; those that end leave it. Raises the error of one that failed."""
        while inbox:
            event = inbox.popleft()
            answers = live.get(event.sequence)
            if answers is None:  # it ran on after the end of its text
                continue
            chunk = answers.take(event)
            if chunk.finish is not None:
                del live[event.sequence]
                self.drop([event.sequence])
            yield chunk

    def _open(self) -> Engine:
        if self._closed:
            raise ClosedError("the model is closed", where=str(self.path), fix="use it inside its 'with' block")
        if self._interrupted:
            self._engine = self._engine.again()
            self._interrupted = False
        return self._engine

    def _forked(self) -> None:
        """In a forked child, where this thread is the only one. If another was in the midst of a step, nobody will ever finish
        it nor let go of the lock: what ran is told so, and the next call makes the engine anew."""
        if self._queue.acquire(blocking=False):
            self._queue.release()
        else:
            self._queue = threading.Lock()
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        self._lock = threading.Lock()
        self._interrupted = True
        reason = "the process was forked in the midst of a step"
        for event in self._engine.fail(InferflowError(reason, where="fork", fix="ask again in the child")):
            event.sequence.inbox.append(event)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            fix = "add its tokenizer.json, or pass token ids"
            raise TextError("the model has no tokenizer", where=str(self.path), fix=fix)
        return self.tokenizer

    # ------------------------------------------------------------------ research

    def logits(self, ids: Sequence[int], *, chunk: int | None = None, positions: slice = slice(None)) -> np.ndarray:
        """Next-token logits at `positions` (all of them, unless it says which), float32 [positions, vocab]. `chunk` runs so
        many tokens at a time, through the cache: the answer is the same to the last bit."""
        numbers = self.prompt_ids(ids)
        if chunk is not None:
            whole_number("chunk", chunk)
        chosen = forward_slice(positions)
        with self.turn():
            return self._open().forward(numbers, chunk=chunk, positions=chosen)["logits"]

    def forward(self, ids: Sequence[int], capture: Sequence[str]) -> dict[str, np.ndarray]:
        """The named tensors of a run over `ids`, float32, first axis the tokens: ``["layers.3.attn_norm", "logits"]``.

        `tensor_names` lists the names. Raises ArgumentError for one that is not there.
        """
        wanted, numbers = captured(capture, self.model.graph.names), self.prompt_ids(ids)
        with self.turn():
            return self._open().forward(numbers, wanted)

    @property
    def engine(self) -> Engine:
        """The step loop, for measuring it. It is not thread-safe: nothing else may use the model meanwhile."""
        return self._open()

    @property
    def plan(self) -> str:
        """How much memory the cache takes, and why, in a sentence."""
        return self._engine.plan.reason

    @property
    def tensor_names(self) -> list[str]:
        """Every name that `forward` can capture."""
        return list(self.model.graph.names)

    def close(self) -> None:
        """Close the model's files. Answers that are still running end with ClosedError. Idempotent."""
        with self.turn():
            if not self._closed:
                self._closed = True
                self.end_all(ClosedError("the model is closed", where=str(self.path), fix="close it later"))
            self.model.source.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_LIVING: weakref.WeakSet[LLM] = weakref.WeakSet()  # for the hook below, which cannot be taken back


def _after_fork() -> None:
    for llm in list(_LIVING):
        for tell in (llm._forked, *llm.after_fork):
            tell()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
