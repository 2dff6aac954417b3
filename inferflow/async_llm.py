"""`AsyncLLM`: an `LLM` for asyncio. A thread of its own steps the engine; tasks admit requests and take what comes of them.

async with AsyncLLM("path/to/model") as llm:
    async for chunk in llm.stream("The capital of France is", max_tokens=16):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from .answers import Answers, Chunk, Completion, Timings
from .arguments import Admission, Prompt, request
from .errors import ClosedError, InferflowError
from .llm import LLM
from .runtime.engine import Event
from .runtime.sampler import Constraint, SamplingParams
from .runtime.scheduler import Totals

__all__ = ["AsyncLLM", "Request", "StepReport"]


@dataclass(frozen=True)
class StepReport:
    """What a step did: `decode` and `prefill` are tokens; `running` and `waiting` sequences after it; `cached` tokens that
    known prefixes saved, and `preempted` sequences, since the step before. `rows`: of each sequence that ran, its number, the
    tokens it gave, those now in the cache, and those of its prompt."""

    step: int
    seconds: float
    decode: int
    prefill: int
    running: int
    waiting: int
    blocks_used: int
    blocks: int
    cached: int
    preempted: int
    rows: tuple[tuple[int, int, int, int], ...]


class Request:
    """An admitted request: iterate over it for the chunks of all its choices, or await `result`. Raises DeadlineError and what
    else ends a sequence. One that is forgotten is aborted."""

    def __init__(self, llm: LLM, answers: Answers) -> None:
        self._llm = llm
        self._answers = answers
        self._inbox = answers.sequences[0].inbox
        self._live = dict.fromkeys(answers.sequences, answers)
        self.loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._chunks: deque[Chunk] = deque()
        self._error: InferflowError | None = None
        self._aborted = False
        for sequence in answers.sequences:
            sequence.owner = weakref.ref(self)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self._answers.prompt_ids

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that an earlier one had left in the cache; None before it starts."""
        return self._answers.sequences[0].cached

    @property
    def progress(self) -> tuple[int, int]:
        """How many tokens of the prompt are in the cache, and how many it has."""
        first = self._answers.sequences[0]
        return min(first.past, first.prompt), first.prompt

    @property
    def timings(self) -> Timings:
        return self._answers.timings

    def __aiter__(self) -> Request:
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            self._news.clear()
            self._take()
            if self._chunks:
                break
            if self._error is not None:
                raise self._error
            if self._aborted or not self._live:
                raise StopAsyncIteration
            await self._news.wait()
        return self._chunks.popleft()

    def _take(self) -> None:
        """What has come; an error after the chunks that came before it."""
        try:
            self._chunks.extend(self._llm.take(self._inbox, self._live))
        except InferflowError as error:
            self._error = error
            self.abort()

    def told(self) -> None:
        """There is news; called on the request's own loop."""
        self._news.set()

    async def result(self) -> Completion:
        """The whole answer, whatever of it was iterated over before. Cancelled, it aborts the request."""
        try:
            async for _ in self:
                pass
        finally:
            self.abort()
        return self._answers.completion()

    def abort(self) -> None:
        """Stop the work, within a step: iterating ends, and `result` is what has come. Idempotent; any thread may call it."""
        if self._live:
            self._aborted = True
            self._llm.drop(self._answers.sequences)
            with suppress(RuntimeError):  # the loop has ended, and nobody waits there
                self.loop.call_soon_threadsafe(self.told)

    def __del__(self) -> None:
        self._llm.drop(self._answers.sequences)


class _Arrival(NamedTuple):
    """A request on its way to the thread that steps."""

    ids: list[int]
    params: SamplingParams
    admission: Admission
    constraints: list[Constraint | None]
    admitted: Future[Answers]


class AsyncLLM:
    """Takes what `LLM` takes. `start` admits a request; `generate`, `stream` and `chat` are made of it. Other threads may use
    `llm` meanwhile, but for closing it.

    `failure`: what ended the thread that steps, if anything did; every request has ended then, and none is admitted. A child
    that the process forks has no such thread: there only `llm` is of use.
    """

    def __init__(self, model: str | Path | None = None, spec: str | Path | None = None, **options: Any) -> None:
        self.llm = LLM(model, spec, **options)
        self.failure: BaseException | None = None
        self._arrivals: deque[_Arrival] = deque()
        self._changed = threading.Condition()  # something arrived, a step has ended, or it is time to stop
        self._refusal: ClosedError | None = None  # why nothing is admitted any more
        self._stopping = False
        self._listeners: list[Callable[[StepReport], None]] = []
        self._totals = Totals()
        self.llm.listeners.append(self._tell)
        self.llm.after_fork.append(self._forked)
        self._thread = threading.Thread(target=self._run, name="inferflow-steps", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ requests

    async def start(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Request:
        """Admit a prompt; `options` are fields of SamplingParams, instead of `params`, and `priority`, `timeout` (seconds) and
        `cache_salt`. Raises ArgumentError, TextError, UnsupportedError, QueueFullError: nothing has run then."""
        sampling, admission = request(params, options)
        ids, constraints = await asyncio.to_thread(
            lambda: (self.llm.prompt_ids(prompt), self.llm.constraints(sampling))
        )
        arrival = _Arrival(ids, sampling, admission, constraints, Future())
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            self._arrivals.append(arrival)
            self._changed.notify_all()
        try:
            return Request(self.llm, await asyncio.wrap_future(arrival.admitted))
        except asyncio.CancelledError:
            arrival.admitted.add_done_callback(self._forget)
            raise

    def _forget(self, admitted: Future[Answers]) -> None:
        """Whoever asked was cancelled just when the request was admitted."""
        if not admitted.cancelled() and admitted.exception() is None:
            self.llm.drop(admitted.result().sequences)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer to one prompt. Cancelling the task aborts it."""
        return await (await self.start(prompt, params, **options)).result()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Chunk]:
        """The answer as it comes. Leaving the loop aborts the rest."""
        made = await self.start(prompt, params, **options)
        try:
            async for chunk in made:
                yield chunk
        finally:
            made.abort()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Answer a conversation by the model's own chat template."""
        return await self.generate(await asyncio.to_thread(self.llm.chat_ids, messages), params, **options)

    async def close(self, drain: float | None = None) -> None:
        """Admit nothing more, give what runs `drain` seconds, end the rest with ClosedError, close the model. Idempotent."""
        with self._changed:
            self._refusal = self._refusal or ClosedError(
                "the model is closed, or about to be", fix="open it again, or ask another server"
            )
        await asyncio.to_thread(self._stop, drain or 0.0)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------ watching

    def add_listener(self, listener: Callable[[StepReport], None]) -> None:
        """Call `listener` after each step of this object's thread, on it: it must be quick, and not raise."""
        if not self._listeners:
            self._totals = replace(self.llm.engine.scheduler.totals)
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[StepReport], None]) -> None:
        self._listeners.remove(listener)

    def _tell(self, events: list[Event]) -> None:
        """Wake the requests that `events` are for, with one call a loop; and, as another thread may have stepped, whoever waits
        for a change."""
        owners = {event.sequence.owner() for event in events if event.sequence.owner is not None}
        loops: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        for owner in owners:
            if owner is not None:
                loops.setdefault(owner.loop, []).append(owner)
        for loop, requests in loops.items():
            with suppress(RuntimeError):  # the loop has ended, and nobody waits there
                loop.call_soon_threadsafe(_wake, requests)
        with self._changed:
            self._changed.notify_all()

    def _report(self) -> StepReport:
        engine, before = self.llm.engine, self._totals
        self._totals = now = replace(engine.scheduler.totals)
        return StepReport(
            now.steps,
            engine.clock() - engine.began,
            now.decoded - before.decoded,
            now.prefilled - before.prefilled,
            len(engine.running),
            len(engine.waiting),
            engine.pool.blocks - len(engine.pool.free),
            engine.pool.blocks,
            now.cached - before.cached,
            now.preempted - before.preempted,
            tuple((s.arrival, count, s.past, s.prompt) for s, count in engine.work),
        )

    # ------------------------------------------------------------------ the thread that steps

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        engine = self.llm.engine
        return bool(self._arrivals or engine.running or engine.waiting)

    def _run(self) -> None:
        try:
            while self._work():
                pass
            error = self._refusal or ClosedError("the model was closed")
        except BaseException as failure:
            self.failure = failure
            reason = f"the engine has failed: {type(failure).__name__}: {failure}"
            error = ClosedError(reason, fix="start it again")
        with self._changed:
            self._refusal = error
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if arrival.admitted.set_running_or_notify_cancel():
                arrival.admitted.set_exception(error)
        with self.llm.turn():
            self.llm.end_all(error)
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> bool:
        """Wait for work and do one step of it; whether to go on."""
        with self._changed:
            while not (self._stopping or self.busy):
                self._changed.notify_all()  # an abort may have ended the last one, and no step told of it
                self._changed.wait()
            if self._stopping:
                return False
        with self.llm.turn():
            while self._arrivals:
                self._admit(self._arrivals.popleft())
            if self.busy:
                self.llm.step()
                if self._listeners:
                    report = self._report()
                    for listener in tuple(self._listeners):
                        listener(report)
        return True

    def _admit(self, arrival: _Arrival) -> None:
        if not arrival.admitted.set_running_or_notify_cancel():
            return  # whoever asked has gone
        try:
            answers = self.llm.admit(arrival.ids, arrival.params, arrival.admission, arrival.constraints)
        except BaseException as error:
            arrival.admitted.set_exception(error)
            if not isinstance(error, InferflowError):
                raise
        else:
            arrival.admitted.set_result(answers)

    def _stop(self, drain: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._thread.is_alive() or not self.busy, drain)
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self.llm.close()

    def _forked(self) -> None:
        """In a forked child."""
        self._changed = threading.Condition()  # the thread that is missing may have held it
        self._arrivals.clear()
        reason = "the process was forked, and what steps the model stayed in the parent"
        self._refusal = ClosedError(reason, fix="make an AsyncLLM in the child, or use its 'llm'")


def _wake(requests: list[Request]) -> None:
    for one in requests:
        one.told()
