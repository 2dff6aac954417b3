"""Beginning and end: of requests whose clients leave, of the server, of the engine."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from inferflow.errors import ArgumentError
from inferflow.server.run import bind
from inferflow.server.service import Service, Settings

from .conftest import SLOW, Client, Server, Start, events

LONG: dict[str, Any] = {"prompt": "once upon a time", "max_tokens": 900, "ignore_eos": True}
DYING = """
from inferflow.runtime import native
import time
run, steps = native.NativeExecutor.run, iter(range(40))
def dying(self, *args):
    time.sleep(0.05)
    if next(steps, None) is None:
        raise RuntimeError("the executor is broken")
    return run(self, *args)
native.NativeExecutor.run = dying
"""

UNREAD = """
import os
from inferflow.server.guard import Guard
note = Guard.note
def unread(self, *args):
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    note(self, *args)
Guard.note = unread
"""


def hang_up(server: Server, path: str, body: dict[str, Any], after: Any) -> None:
    """Send a request; when `after` holds, close the connection without a word."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(head + data)
        server.until(after)


@pytest.fixture(scope="module")
def slow(folder: Any) -> Any:
    """A server whose steps take their time."""
    from .conftest import address, launch

    server = launch(folder, prelude=SLOW)
    server.url = address(server)
    yield server
    server.kill()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_hangs_up(slow: Server, path: str, stream: bool, n: int) -> None:
    """Its work ends with it, and no other's does."""
    body = {**LONG, "stream": stream, "n": n}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    other: list[httpx.Response] = []
    ask = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    thread = threading.Thread(
        target=lambda: other.append(httpx.post(f"{slow.url}/v1/completions", json=ask, timeout=60))
    )
    thread.start()
    done = slow.metric("inferflow_decode_tokens_total")
    hang_up(slow, path, body, lambda: slow.metric("inferflow_decode_tokens_total") > done + 4 * n + 3)
    slow.until(slow.idle, 10)
    thread.join()
    assert slow.metric("inferflow_decode_tokens_total") < done + 40 + 400 * n
    assert other[0].json()["choices"][0]["text"] == Client(slow).ask("/v1/completions", **ask)["choices"][0]["text"]
    slow.wait_for(f"POST {path} 499")


def test_clients_that_leave_before_they_are_answered(start: Start) -> None:
    """While they wait for a place, and in the midst of a long prompt."""
    server = start("--policy", "sequential", "--token-budget", "8", prelude=SLOW)
    running = "inferflow_requests_running"
    long = {**LONG, "prompt": "once upon a time " * 30, "max_tokens": 100}

    def queued() -> bool:
        return server.metric("inferflow_requests_waiting") >= 1

    with server.http.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as first:
        server.until(lambda: server.metric(running) == 1)
        hang_up(server, "/v1/completions", long, queued)
        hang_up(server, "/v1/completions", {**long, "stream": True}, queued)
        server.until(lambda: not queued())
        assert server.metric(running) == 1
        first.close()
    server.until(server.idle, 10)
    before = server.metric("inferflow_prefill_tokens_total")
    hang_up(server, "/v1/completions", long, lambda: server.metric("inferflow_prefill_tokens_total") > before)
    server.until(server.idle, 10)
    assert server.metric("inferflow_generated_tokens_total") == 0


def test_a_reader_that_does_not_read(slow: Server) -> None:
    """Holds nobody up, and when it is gone nothing of it is left."""
    data = json.dumps({**LONG, "stream": True, "n": 8, "logprobs": 5}).encode()
    place = urlsplit(slow.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((place.hostname, place.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        connection.sendall(head + data)
        slow.until(lambda: slow.metric("inferflow_requests_running") == 8)
        assert Client(slow).ask("/v1/completions", prompt="x", max_tokens=3)
    slow.until(slow.idle, 10)


def test_sigterm_lets_running_requests_finish(start: Start) -> None:
    server = start(prelude=SLOW)
    got: list[str] = []
    body = {**LONG, "max_tokens": 60, "stream": True}
    asks = [threading.Thread(target=lambda: got.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text))
            for _ in range(3)]  # fmt: skip
    for thread in asks:
        thread.start()
    server.until(lambda: server.metric("inferflow_requests_running") == 3)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: server.http.get(f"{server.url}/ready").status_code == 503)
    assert server.http.get(f"{server.url}/health").status_code == 200
    refused = server.http.post(f"{server.url}/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert server.process.wait(60) == 0
    for thread in asks:
        thread.join()
    for text in got:
        told = events(text)
        assert told[-1] == "[DONE]"
        assert told[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("twice", [False, True])
def test_what_does_not_finish_in_time_is_told_so(start: Start, twice: bool) -> None:
    """Or when a second signal says not to wait."""
    server = start("--drain", "60" if twice else "0.2", prelude=SLOW)
    got: list[str] = []

    def ask() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
            got.extend(answer.iter_text())

    thread = threading.Thread(target=ask)
    thread.start()
    server.until(lambda: bool(got))
    server.process.send_signal(signal.SIGINT)
    if twice:
        server.wait_for("ending: 1 request")
        server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
    thread.join()
    told = events("".join(got))
    assert told[-2]["error"]["code"] == "closed"
    assert told[-1] == "[DONE]"
    server.reader.join()
    assert not any("Traceback" in line for line in server.said), "\n".join(server.said)


def test_an_idle_server_ends_at_once(start: Start) -> None:
    server = start()
    with server.http.stream("GET", f"{server.url}/live") as live:
        next(live.iter_text())
        assert server.end() == 0
    assert not [line for line in server.said if "error" in line or "Traceback" in line]


def test_a_dead_engine(start: Start) -> None:
    """Who waits is told at once, who asks is told, and the process ends with a status that says so."""
    server = start(prelude=DYING)
    streamed: list[str] = []
    thread = threading.Thread(
        target=lambda: streamed.append(
            httpx.post(f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=60).text
        )
    )
    thread.start()
    server.until(lambda: server.metric("inferflow_requests_running") == 1)
    whole = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60)
    assert whole.status_code == 503
    assert "the executor is broken" in whole.json()["error"]["message"]
    thread.join()
    assert events(streamed[0])[-2]["error"]["code"] == "closed"
    health = server.http.get(f"{server.url}/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "dead")
    assert server.http.get(f"{server.url}/ready").status_code == 503
    assert server.process.wait(30) == 1
    server.wait_for("the engine has died: RuntimeError")


def test_a_log_that_nobody_reads_any_more(start: Start) -> None:
    """Harms no request, and no end."""
    server = start(prelude=UNREAD)
    for _ in range(3):
        assert Client(server).ask("/v1/completions", prompt="x", max_tokens=2)
    assert server.end() == 0


def test_kill_leaves_the_port_free(start: Start) -> None:
    server = start()
    port = urlsplit(server.url).port
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    bind("127.0.0.1", port or 0).close()


def test_an_address_that_is_not_to_be_had(start: Start) -> None:
    taken = start()
    port = str(urlsplit(taken.url).port)
    for args, words in (
        (["--port", port], f"127.0.0.1:{port}: Address already in use \\(choose another --port"),
        (["--port", "70000"], "--port: it is 70000"),
        (["--host", "no.such.host.invalid"], "--host: there is no such address"),
        (["--host", "192.0.2.1"], "192.0.2.1:0: "),
    ):
        server = start(*args, wait=False)
        assert server.process.wait(60) in (1, 2)
        server.reader.join()
        assert re.search(words, "\n".join(server.said)), server.said
        assert not any("Traceback" in line for line in server.said)
    with pytest.raises(ArgumentError):
        bind("127.0.0.1", -1)


def test_what_is_said_at_the_start(start: Start) -> None:
    server = start(
        "--max-model-len",
        "128",
        "--slots",
        "3",
        "--token-budget",
        "32",
        "--served-model-name",
        "a",
        "--served-model-name",
        "b",
    )
    told = "\n".join(server.said)
    assert "KV cache: 6 blocks of 64 tokens" in told
    assert "limits: 128 tokens a request, 32 a step" in told
    assert "temperature 1" in told
    client = Client(server)
    assert [model["id"] for model in server.http.get(f"{server.url}/v1/models").json()["data"]] == ["a", "b"]
    assert client.ask("/v1/completions", model="b", prompt="x", max_tokens=1)["model"] == "a"


def test_the_models_own_defaults(start: Start, folder: Any, tmp_path: Any) -> None:
    """Those of generation_config.json count where a request says nothing; what is wrong there does not."""
    import shutil

    path = shutil.copytree(folder, tmp_path / "mild")
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "top_p": 7, "top_k": 5}))
    server = start("-m", str(path))
    server.wait_for("sampling unless a request says otherwise: temperature 0.0, top_k 5")
    assert any("generation_config.json: top_p is 7 and is left out" in line for line in server.said)
    client = Client(server)
    ask = {"prompt": "hello", "max_tokens": 6}
    assert len({client.ask("/v1/completions", **ask)["choices"][0]["text"] for _ in range(4)}) == 1
    assert len({client.ask("/v1/completions", **ask, temperature=3)["choices"][0]["text"] for _ in range(4)}) > 1


def test_a_loop_that_makes_no_step_is_not_ready() -> None:
    """Nor does it matter that nothing has died, or that an idle one makes none either."""
    engine = SimpleNamespace(running=[], waiting=[])
    inner = SimpleNamespace(engine=engine, model=SimpleNamespace(config={}))
    llm: Any = SimpleNamespace(llm=inner, failure=None, add_listener=id, remove_listener=id)
    service = Service(llm, Settings(("tiny",), stuck=0.0))
    assert service.trouble is None
    engine.waiting.append(1)
    service.active = 1
    time.sleep(0.001)
    assert "no step has ended" in (service.trouble or "")
    service.live.slowest = 60.0  # such steps are long
    assert service.trouble is None
    llm.failure = RuntimeError()
    assert service.trouble == "the engine has died"
    service.close()


def test_without_the_extra(folder: Any) -> None:
    code = "import sys; sys.modules['uvicorn'] = None\nfrom inferflow.cli.main import main\nmain(['serve'])"
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'inferflow[serve]'" in done.stderr


def test_a_soak_of_clients_that_come_and_go(slow: Server) -> None:
    """Whatever they send and whenever they leave: nothing is left of them, and who stays is answered as ever."""
    stop = time.monotonic() + 5
    texts: list[str] = []

    def rude(number: int) -> None:
        while time.monotonic() < stop:
            body = {**LONG, "stream": number % 2 == 0, "n": 1 + number % 3}
            moment = time.monotonic() + 0.05 * (1 + number % 5)
            hang_up(
                slow, "/v1/completions", body if number % 4 else {"prompt": []}, lambda m=moment: time.monotonic() > m
            )

    def polite() -> None:
        with httpx.Client(base_url=slow.url, timeout=60) as http:
            while time.monotonic() < stop:
                ask = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
                texts.append(http.post("/v1/completions", json=ask).json()["choices"][0]["text"])

    threads = [threading.Thread(target=rude, args=(n,)) for n in range(6)] + [threading.Thread(target=polite)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(texts)) == 1
    slow.until(slow.idle)
    assert not any("Traceback" in line for line in slow.said), "\n".join(slow.said)
