"""From admitted prompts to what is sent: one JSON object, or server-sent events as the tokens come."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..answers import Choice, Chunk, Completion
from ..async_llm import Request
from ..errors import InferflowError
from ..runtime.sampling_params import SamplingParams
from .body import Fields
from .errors import bad, refusal, refusing
from .service import Service, while_connected
from .shapes import Shape, timings, usage

__all__ = ["Delivery", "EventStream", "answer"]

TICK = 0.1  # seconds between two events of progress
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass
class Delivery:
    """How an answer is sent. `whole`: a stream's choices come at once, since what is asked for is only known at the end;
    `score_only`: without the token that had to be made."""

    stream: bool = False
    usage: bool = False
    progress: bool = False
    whole: bool = False
    score_only: bool = False
    names: Mapping[str, str] = field(default_factory=dict)  # the request's words for fields of SamplingParams

    @classmethod
    def take(cls, fields: Fields) -> Delivery:
        stream, progress = fields.flag("stream"), fields.flag("return_progress")
        options = fields.table("stream_options")
        if options is None:
            return cls(stream, False, progress)
        if not stream:
            raise bad("stream_options", "the answer is not streamed", "set stream, or leave it out")
        told = options.flag("include_usage")
        options.flag("include_obfuscation")
        if options.flag("continuous_usage_stats"):
            raise bad("stream_options.continuous_usage_stats", "it is not served", "use include_usage", "unsupported")
        options.done()
        return cls(stream, told, progress)


@dataclass(frozen=True)
class Head:
    """What all parts of one answer begin with."""

    id: str
    created: int
    model: str

    def part(self, kind: str, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": "inferflow",
            "choices": list(choices), **more,
        }  # fmt: skip


async def answer(
    http: HttpRequest,
    service: Service,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    admission: Mapping[str, Any],
    shape: Shape,
    delivery: Delivery,
) -> Response:
    """Admit `prompts`, all of them or none, then answer. What is refused is refused before a stream begins."""
    head = Head(f"{shape.prefix}{secrets.token_hex(12)}", int(time.time()), service.settings.names[0])
    requests: list[Request] = []
    try:
        with refusing(delivery.names, service.metrics.last_queued):
            jobs = [service.llm.start(ids, params, **admission) for ids in prompts]
            started = await asyncio.gather(*jobs, return_exceptions=True)
            requests += [one for one in started if isinstance(one, Request)]
            for error in started:
                if isinstance(error, BaseException):
                    raise error
            if delivery.stream:
                stream = Streaming(service, requests, params.n, head, shape, delivery, http)
                return EventStream(stream.events(), requests)
            completions = await finished(service, requests, delivery, http)
    except BaseException:
        abort(requests)
        raise
    made = choices(shape, completions, params.n)
    return JSONResponse(head.part(shape.kind, made, usage=usage(completions), timings=timings(completions)))


def abort(requests: Sequence[Request]) -> None:
    for request in requests:
        request.abort()


async def finished(
    service: Service, requests: Sequence[Request], delivery: Delivery, http: HttpRequest
) -> list[Completion]:
    """The whole answers, counted and noted."""
    completions = list(await asyncio.gather(*(request.result() for request in requests)))
    for completion in completions:
        service.metrics.answered(completion)
    if delivery.score_only:
        completions = [replace(one, choices=tuple(map(_nothing, one.choices))) for one in completions]
    prompt = sum(len(one.prompt_ids) for one in completions)
    cached = sum(one.cached_tokens for one in completions)
    ends = [choice.finish for one in completions for choice in one.choices]
    new = sum(len(choice.ids) for one in completions for choice in one.choices)
    http.state.note = f"prompt={prompt} cached={cached} new={new} finish={','.join(dict.fromkeys(ends))}"
    return completions


def _nothing(choice: Choice) -> Choice:
    return replace(choice, text="", ids=(), finish="length", stop_string=None, logprobs=choice.logprobs and ())


def choices(shape: Shape, completions: Sequence[Completion], n: int) -> list[dict[str, Any]]:
    return [
        shape.choice(at * n + choice.index, choice, one) for at, one in enumerate(completions) for choice in one.choices
    ]


async def merged(requests: Sequence[Request], tick: float | None) -> AsyncGenerator[tuple[int, Chunk] | None, None]:
    """The chunks of all requests as they come, each with its request's number; None after `tick` seconds without any."""
    if len(requests) == 1 and tick is None:
        async for chunk in requests[0]:
            yield 0, chunk
        return
    waiting = {asyncio.ensure_future(request.__anext__()): at for at, request in enumerate(requests)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for task in done:
                at = waiting.pop(task)
                try:
                    chunk = task.result()
                except StopAsyncIteration:
                    continue
                tick = None
                waiting[asyncio.ensure_future(requests[at].__anext__())] = at
                yield at, chunk
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@dataclass
class Streaming:
    """One answer, as OpenAI's clients expect it: what comes before the first token, chunks, what they cost, ``[DONE]``."""

    service: Service
    requests: Sequence[Request]
    n: int
    head: Head
    shape: Shape
    delivery: Delivery
    http: HttpRequest

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._whole() if self.delivery.whole else self._parts()) as parts:
                async for part in parts:
                    yield _event(part)
        except InferflowError as error:
            told = refusal(error, self.delivery.names)
            self.http.state.note = f"error={told.message}"
            yield _event(told.body())
        finally:
            abort(self.requests)
        yield b"data: [DONE]\n\n"

    def _part(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        told = {"usage": None} if self.delivery.usage else {}
        return self.head.part(self.shape.chunk_kind, choices, **told, **more)

    async def _whole(self) -> AsyncGenerator[dict[str, Any], None]:
        completions = await finished(self.service, self.requests, self.delivery, self.http)
        parts = [self._part([choice]) for choice in choices(self.shape, completions, self.n)]
        parts[-1]["timings"] = timings(completions)
        for part in parts + [self._cost(completions)] * self.delivery.usage:
            yield part

    async def _parts(self) -> AsyncGenerator[dict[str, Any], None]:
        left = len(self.requests) * self.n
        for index in range(left):
            opening = self.shape.opening(index)
            if opening is not None:
                yield self._part([opening])
        start, told = time.monotonic(), -1
        async with aclosing(merged(self.requests, TICK if self.delivery.progress else None)) as chunks:
            async for news in chunks:
                progress = self._progress(start) if self.delivery.progress else None
                if progress is not None and progress["processed"] > told:
                    told = progress["processed"]
                    yield self._part([], prompt_progress=progress)
                if news is None:
                    continue
                at, chunk = news
                left -= chunk.finish is not None
                parts = [self._part([choice]) for choice in self.shape.pieces(at * self.n + chunk.index, chunk)]
                if not left:
                    completions = await finished(self.service, self.requests, self.delivery, self.http)
                    parts[-1]["timings"] = timings(completions)
                    parts += [self._cost(completions)] * self.delivery.usage
                for part in parts:
                    yield part

    def _progress(self, start: float) -> dict[str, Any]:
        """In the form that other servers made common: tokens of the prompts, those of them that were cached or are computed."""
        done = [request.progress for request in self.requests]
        return {
            "total": sum(total for _, total in done), "cache": sum(r.cached_tokens or 0 for r in self.requests),
            "processed": sum(now for now, _ in done), "time_ms": round(1000 * (time.monotonic() - start), 3),
        }  # fmt: skip

    def _cost(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self.head.part(self.shape.chunk_kind, [], usage=usage(completions))


def _event(part: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(part, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Server-sent events. When the client hangs up, `events` is closed, and what it stands for with it."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], requests: Sequence[Request] = ()) -> None:
        self.status_code = 200
        self.background = None
        self.events = events
        self.requests = requests
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            async with aclosing(self.events):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for event in self.events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await while_connected(receive, work())
        finally:
            abort(self.requests)  # also of a stream that never began
