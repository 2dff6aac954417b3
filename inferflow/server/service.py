"""What all routes share: the model, the settings, and the state of the service."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from ..async_llm import AsyncLLM
from ..errors import TextError, one_line
from ..text import ChatTemplate, Tokenizer
from .body import Fields, read_json
from .errors import ApiError, ClientGoneError
from .live import Live
from .metrics import Metrics
from .sampling import model_defaults

__all__ = ["Service", "Settings", "while_connected"]

T = TypeVar("T")
SMALL = 1 << 18  # bytes of JSON that are read on the loop


@dataclass(frozen=True)
class Settings:
    """`names` the model answers to, the first being its own. `api_key` None asks for none. Browsers' pages may ask from
    `origins` (``*``: any) beside our own; `hosts` are the names that the service may be called by (None: any). `max_body`:
    bytes of a request. `stuck`: seconds without a step, while there is work, after which the service is not ready."""

    names: tuple[str, ...]
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    max_body: int = 16 << 20
    quiet: bool = False
    stuck: float = 60.0


class Service:
    """One model, served. `draining`: no new work is taken; `active`: requests that are being answered."""

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self.llm = llm
        self.settings = settings
        self.defaults = model_defaults(llm.llm.model.config)
        self.live = Live()
        self.metrics = Metrics()
        self.started = int(time.time())
        self.draining = False
        self.active = 0
        self.template: ChatTemplate | None = None
        self._threads = ThreadPoolExecutor(2, "text")
        llm.add_listener(self.live.push)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.llm.tokenizer

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TextError("the model has no tokenizer", fix="send token ids to /v1/completions")
        return self.tokenizer

    def need_template(self) -> ChatTemplate:
        """The model's chat template, compiled once."""
        if self.template is None:
            self.template = ChatTemplate.of(self.need_tokenizer())
        return self.template

    async def off_loop(self, work: Callable[..., T], *args: Any) -> T:
        """Text and templates take time: on threads of their own, of which no flood of requests makes more."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def fields(self, request: Request) -> Fields:
        """The request's fields (its body has been read), its model being ours."""
        data = request.state.body
        fields = Fields(read_json(data) if len(data) < SMALL else await self.off_loop(read_json, data))
        request.state.ignored = fields.ignored
        asked = fields.text("model")
        if asked is not None and asked not in self.settings.names:
            known = ", ".join(self.settings.names)
            raise ApiError(
                404, f"there is no model '{one_line(asked, 200)}' here, only {known}", "model", "model_not_found"
            )
        return fields

    def check_room(self, ids: list[int], wanted: int | None, param: str) -> None:
        """Refuses what can never fit, with the numbers."""
        room = self.llm.llm.max_model_len
        if len(ids) + (wanted or 1) > room:
            more = f" and max_tokens is {wanted}" if wanted else ""
            numbers = {"n_prompt_tokens": len(ids), "n_ctx": room}
            reason = (
                f"{param}: it has {len(ids)} tokens{more}, and the context holds {room} (shorten it, or ask for less)"
            )
            raise ApiError(400, reason, param, "context_length_exceeded", numbers)

    def room(self, tokens: int) -> int:
        """How many more tokens than those of its prompt a sequence can have."""
        engine = self.llm.llm.engine
        return min(self.llm.llm.max_model_len, engine.pool.blocks * engine.block_size) - tokens

    @property
    def trouble(self) -> str | None:
        """Why nothing can be generated, if it cannot."""
        if self.llm.failure is not None:
            return "the engine has died"
        if self.draining:
            return "the service is ending"
        engine = self.llm.llm.engine
        busy = bool(engine.running or engine.waiting)
        since = time.monotonic() - self.live.stepped
        if busy and self.active and since > max(self.settings.stuck, 10 * self.live.slowest):
            return f"no step has ended for {since:.0f} s"
        return None

    def log(self, line: str) -> None:
        if not self.settings.quiet:
            with contextlib.suppress(OSError):  # whoever read it may have gone
                print(one_line(line), file=sys.stderr, flush=True)

    def close(self) -> None:
        self.llm.remove_listener(self.live.push)
        self._threads.shutdown(wait=False, cancel_futures=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up: then ClientGoneError. The body must have been read."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
