"""Serving on a socket until told to stop: then no new work, what runs may finish, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
from types import FrameType

import uvicorn

from ..async_llm import AsyncLLM
from ..errors import ArgumentError, system_error
from .app import make_app
from .service import Service, Settings

__all__ = ["bind", "is_loopback", "serve", "url_of"]

LINGER = 5.0  # seconds that connections have to close
WATCH = 0.2  # seconds between two looks at the engine
LAST_WORDS = 1.0  # seconds in which a dead engine's clients, and who asks for /health, are told


def bind(host: str, port: int) -> socket.socket:
    """A socket at that address, on which nobody listens yet. InferflowError where it is taken or not ours."""
    where = f"{host}:{port}"
    if not 0 <= port < 1 << 16:
        raise ArgumentError(f"it is {port}", where="port", fix="it must be from 0 (any that is free) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ArgumentError(f"there is no such address '{host[:200]}'", where="host", fix="use 127.0.0.1") from None
    made = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it means that two may share a port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        said = system_error(error, where)
        said.fix = "choose another port, or port 0 for any that is free"
        raise said from None
    return made


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


class Server(uvicorn.Server):
    """The first signal asks for the end, the second does not wait for what runs, a third ends the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.asked, self.hurried = asyncio.Event(), asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.asked.is_set():
            self.force_exit = self.should_exit  # nor for connections, if those are all that is left
            logging.getLogger("uvicorn.error").disabled = True  # what it cuts off now is no error
            signal.signal(sig, signal.SIG_DFL)
            self.loop.call_soon_threadsafe(self.hurried.set)
        self.loop.call_soon_threadsafe(self.asked.set)


def serve(llm: AsyncLLM, settings: Settings, bound: socket.socket, drain: float) -> int:
    """Serve until a signal comes: 0; or until the engine dies: 1. The socket and the model are closed then."""
    return asyncio.run(_serve(llm, settings, bound, drain))


async def _serve(llm: AsyncLLM, settings: Settings, bound: socket.socket, drain: float) -> int:
    service = Service(llm, settings)
    config = uvicorn.Config(
        make_app(service), log_config=None, log_level="warning", access_log=False, http="h11", ws="none", lifespan="off",
        server_header=False, timeout_graceful_shutdown=int(LINGER),
    )  # fmt: skip
    server = Server(config)
    serving = asyncio.create_task(server.serve([bound]))
    watch = asyncio.create_task(_death(llm))
    asked, hurried = (asyncio.create_task(event.wait()) for event in (server.asked, server.hurried))
    await asyncio.wait({serving, watch, asked}, return_when=asyncio.FIRST_COMPLETED)
    service.draining = True
    if watch.done():
        service.log(f"the engine has died: {llm.failure!r}")
        await asyncio.sleep(LAST_WORDS)
    elif asked.done():
        service.log(
            f"ending: {service.active} requests are being answered, for at most {drain:g} s; ask again to wait no more"
        )
        ended = asyncio.create_task(_idle(service))
        await asyncio.wait({serving, watch, ended, hurried}, timeout=drain, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
    status = int(llm.failure is not None)
    await llm.close()  # those who wait are told so
    server.should_exit = True
    for task in (watch, asked, hurried):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    service.close()
    return status


async def _death(llm: AsyncLLM) -> None:
    while llm.failure is None:
        await asyncio.sleep(WATCH)


async def _idle(service: Service) -> None:
    while service.active:
        await asyncio.sleep(WATCH / 4)
