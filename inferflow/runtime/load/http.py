"""Running a workload on a server that streams OpenAI's completions, over HTTP.

The clock is read as pieces of an answer come in; what is in them is looked at after the last one, when nobody waits.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from ...errors import ArgumentError, InferflowError
from .record import Record
from .workload import Request, Workload

__all__ = ["IDS", "Server"]

IDS = range(100, 1000)  # token ids of prompts: below are control tokens, and every vocabulary is larger
_Piece = tuple[float, bytes]  # when it came


@dataclass(frozen=True)
class Server:
    """A server at `url`, such as ``http://127.0.0.1:8000``. `model`: the name to ask for; None: the first that it lists.
    `timeout`: seconds without a sign of life after which a request has failed."""

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise ArgumentError(f"'{self.url[:80]}' is no server's URL", where="url", fix="http://127.0.0.1:8000")

    def named(self) -> Server:
        """The same, with the name of its model. Raises InferflowError where nothing answers."""
        if self.model is not None:
            return self
        try:
            with self._ask("GET", "/v1/models") as answer:
                body = answer.read()
            if answer.status != 200:
                raise InferflowError(_said(answer.status, body), where=self.url, fix="check --url and --api-key")
            return replace(self, model=str(json.loads(body)["data"][0]["id"]))
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InferflowError(f"no server answers: {why}", where=self.url, fix="start it: inferflow serve") from None
        except (ValueError, LookupError, TypeError):
            fix = "name the model"
            raise InferflowError("it does not say which models it has", where=self.url, fix=fix) from None

    def drive(self, load: Workload, clock: Callable[[], float] = time.perf_counter) -> list[Record]:
        """The records of the workload's requests, in order. Each has a thread and a connection of its own."""
        start = clock()
        workers = load.clients or len(load.requests)

        def run(request: Request) -> tuple[Record, list[_Piece]]:
            now = clock() - start
            record = Record(now if load.clients else request.at, len(request.prompt))
            return record, self._run(request, record, lambda: clock() - start)

        futures: list[Future[tuple[Record, list[_Piece]]]] = []
        with ThreadPoolExecutor(workers, "client") as pool:
            for request in load.requests:
                time.sleep(max(0.0, request.at - (clock() - start)))
                futures.append(pool.submit(run, request))
        return [finished(*future.result()) for future in futures]

    def _run(self, request: Request, record: Record, clock: Callable[[], float]) -> list[_Piece]:
        """What came, and when. The record has the error of what did not."""
        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces: list[_Piece] = []
        try:
            with self._ask("POST", "/v1/completions", json.dumps(body)) as answer:
                if answer.status != 200:
                    record.error = _said(answer.status, answer.read())
                while record.error is None and (data := answer.read1(1 << 16)):
                    pieces.append((clock(), data))
        except (OSError, http.client.HTTPException) as error:
            record.error = str(error) or type(error).__name__
        return pieces

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        try:
            connection.request(method, parts.path.rstrip("/").removesuffix("/v1") + path, body, headers)
            yield connection.getresponse()
        finally:
            connection.close()


def finished(record: Record, pieces: Iterable[_Piece]) -> Record:
    """The record, with what the pieces of the stream say. A chunk with text is a token, and so is one without that is not the
    last: its text is held back."""
    for when, event in events(pieces):
        if "error" in event:
            record.error = str(event["error"])[:500]
            break
        for choice in event.get("choices") or ():
            if choice.get("text") or choice.get("finish_reason") is None:
                record.times.append(when)
        record.counted = (event.get("usage") or {}).get("completion_tokens", record.counted)
    if record.error is None and not record.times:
        record.error = "the stream has no tokens"
    return record


def events(pieces: Iterable[_Piece]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON objects of a stream of server-sent events, each with the time at which its end came."""
    rest = b""
    for when, data in pieces:
        *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
            text = b"\n".join(line.removeprefix(b"data:").strip() for line in lines)
            if text and text != b"[DONE]":
                try:
                    yield when, dict(json.loads(text))
                except (ValueError, TypeError):
                    yield when, {"error": f"the stream has an event that is no JSON object: {text[:80]!r}"}


def _said(status: int, body: bytes) -> str:
    """A refusal, as OpenAI's servers shape it, or as it is."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body.decode("utf-8", "replace")
    return f"status {status}: {str(message)[:500]}"
