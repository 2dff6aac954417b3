"""Load over HTTP, on a server of a few lines: what is asked, when pieces came, what counts as a token, what fails and how."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from inferflow.errors import ArgumentError, InferflowError
from inferflow.runtime.load.http import Server, events, finished
from inferflow.runtime.load.record import Record
from inferflow.runtime.load.workload import Request, Workload

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


@contextmanager
def serving(answer: Answer, models: bytes = b'{"data": [{"id": "m"}]}') -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on loopback, and the bodies that it is asked with, headers among them."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say(200 if self.path == "/v1/models" else 404, models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({**body, "path": self.path, "authorization": self.headers["Authorization"]})
            self.say(*answer(body))

        def say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def stream(*chunks: Any) -> bytes:
    return b"".join(f"data: {json.dumps(c)}\n\n".encode() for c in chunks) + b"data: [DONE]\n\n"


def chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish}], **more}


def test_a_request_as_openai_has_it() -> None:
    says = lambda body: (200, stream(*(chunk("x") for _ in range(body["max_tokens"])), chunk("", "length")))  # noqa: E731
    load = Workload((Request((5, 6), 3), Request((7,), 1), Request((8,), 2)), clients=2)
    with serving(says) as (url, asked):
        server = Server(f"{url}/v1/", key="secret").named()
        records = server.drive(load)
    assert (server.model, "secret" in repr(server)) == ("m", False)
    assert sorted(a["prompt"] for a in asked) == [[5, 6], [7], [8]]
    first = next(a for a in asked if a["prompt"] == [5, 6])
    assert first == {
        "model": "m", "prompt": [5, 6], "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "path": "/v1/completions", "authorization": "Bearer secret",
    }  # fmt: skip
    assert [(r.error, r.prompt, r.output) for r in records] == [(None, 2, 3), (None, 1, 1), (None, 1, 2)]
    assert all(0 < r.arrival <= r.times[0] <= r.ended for r in records)


def test_requests_of_an_open_loop_arrive_when_they_say() -> None:
    with serving(lambda body: (200, stream(chunk("x", "length")))) as (url, _):
        records = Server(url, "m").drive(Workload((Request((1,), 1, 0.0), Request((2,), 1, 0.05))))
    assert [r.arrival for r in records] == [0.0, 0.05]
    assert records[1].times[0] >= 0.05


def test_tokens_of_a_stream() -> None:
    text = stream(
        chunk("a"), chunk(""), chunk("b\n\nc"), chunk("", "length"), {"choices": [], "usage": {"completion_tokens": 5}}
    )
    pieces = [(float(n), text[n : n + 1]) for n in range(len(text))]  # byte by byte
    record = finished(Record(0.0, 1), pieces)
    ends = [n + 1 for n in range(len(text)) if text[n : n + 2] == b"\n\n"]
    assert (record.times, record.counted, record.output, record.error) == ([*map(float, ends[:3])], 5, 5, None)
    windows = text.replace(b"\n\n", b"\r\n\r\n")
    assert [e for _, e in events([(0.0, windows)])] == [e for _, e in events(pieces)]


def test_the_last_chunk_is_a_token_where_it_has_text() -> None:
    assert finished(Record(0.0, 1), [(1.0, stream(chunk("a"))), (2.0, stream(chunk("b", "stop")))]).times == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b'data: {"error": {"message": "it broke"}}\n\n', "it broke"),
        (b"data: [DONE]\n\n", "no tokens"),
        (b"", "no tokens"),
        (b"data: {oops\n\n", "no JSON object"),
        (b"data: [1]\n\n", "no JSON object"),
        (b": a comment\n\nevent: x\n\n", "no tokens"),
    ],
)
def test_a_stream_that_fails(text: bytes, error: str) -> None:
    assert error in str(finished(Record(0.0, 1), [(1.0, text)]).error)


def test_refusals_and_broken_connections_are_errors_of_their_requests() -> None:
    bad = json.dumps({"error": {"message": "the queue is full"}}).encode()

    def says(body: dict[str, Any]) -> tuple[int, bytes]:
        if body["prompt"] == [3]:
            raise ConnectionAbortedError  # the handler dies, and its connection with it
        return {1: (429, bad), 2: (500, b"oh no")}.get(body["prompt"][0], (200, stream(chunk("x", "stop"))))

    with serving(says) as (url, _):
        ThreadingHTTPServer.handle_error = lambda *a: None  # type: ignore[method-assign]
        try:
            records = Server(url, "m").drive(Workload(tuple(Request((n,), 1) for n in range(1, 5)), clients=1))
        finally:
            del ThreadingHTTPServer.handle_error
    assert [r.error for r in records[:2]] == ["status 429: the queue is full", "status 500: oh no"]
    assert records[2].error
    assert (records[3].error, len(records[3].times)) == (None, 1)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "ftp://x", "http://", "http://x:99999", "http://[", "http://x:0", "x" * 200]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ArgumentError, match="is no server's URL"):
        Server(url)


def test_a_server_that_is_not_there_or_says_nonsense() -> None:
    with serving(lambda body: (200, b"")) as (url, _):
        pass
    with pytest.raises(InferflowError, match="no server answers") as caught:
        Server(url, timeout=5).named()
    assert "inferflow serve" in caught.value.fix
    for models in (b"{}", b"[]", b"no", b'{"data": []}', b'{"data": [1]}'):
        with (
            serving(lambda body: (200, b""), models) as (url, _),
            pytest.raises(InferflowError, match="does not say which models"),
        ):
            Server(url).named()
    with serving(lambda body: (200, b"")) as (url, _), pytest.raises(InferflowError, match="status 404"):
        Server(f"{url}/elsewhere").named()
