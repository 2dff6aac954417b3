"""A tiny model that speaks, random as it is, and ``inferflow serve`` with it in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.text.small import byte_level, save
from tests.text.templates import CHATML
from tests.tiny import CONFIG, tensors, write

ROOT = Path(__file__).resolve().parent.parent.parent
LENGTH = 1024
BLOCKS = "inferflow_kv_blocks_used"

# Python that makes every step take its time.
SLOW = """
import time
from inferflow.runtime import native
run = native.NativeExecutor.run
def slow(self, *args):
    time.sleep(0.02)
    return run(self, *args)
native.NativeExecutor.run = slow
"""


@dataclass
class Server:
    """A running server: `url`, and what it has said."""

    process: subprocess.Popen[str]
    url: str = ""
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.http = httpx.Client(timeout=60, verify=False)

    def read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.said.append(line.rstrip("\n"))

    def wait_for(self, words: str, seconds: float = 60) -> str:
        """The first line that matches."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended = self.process.poll() is not None
            for line in tuple(self.said):
                if re.search(words, line):
                    return line
            assert not ended, self.said
            time.sleep(0.02)
        raise AssertionError(f"never said: {words}\n" + "\n".join(self.said))

    def metric(self, name: str, **options: Any) -> float:
        text = self.http.get(f"{self.url}/metrics", **options).text
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

    def until(self, reached: Callable[[], bool], seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, "\n".join(self.said)
            time.sleep(0.02)

    def idle(self) -> bool:
        """Nothing runs, nothing waits, and every block is free."""
        names = (BLOCKS, "inferflow_requests_running", "inferflow_requests_waiting")
        return all(self.metric(name) == 0 for name in names)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        status = self.process.wait(60)
        self.reader.join()
        return status

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.http.close()


Start = Callable[..., Server]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model: a vocabulary of bytes, a chat template, random weights."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = byte_level()
    config = {**CONFIG, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": LENGTH}
    write(path, config, tensors(config))
    save(tokenizer, path, chat_template=CHATML)
    return path


def launch(folder: Path, *args: str, prelude: str = "", env: dict[str, str] | None = None) -> Server:
    """``inferflow serve`` on a free port; `prelude` is Python that its process runs first."""
    code = f"{prelude}\nfrom inferflow.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, "serve", "-m", str(folder), "--port", "0", "--threads", "1", *args]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
    )
    return Server(process)


def address(server: Server) -> str:
    """Where it listens, once it does."""
    found = re.search(r"http://[^ ,]+", server.wait_for("listening on"))
    assert found is not None
    return found[0]


@pytest.fixture
def start(folder: Path, plain_signals: None) -> Iterator[Start]:
    """Starts servers that end with the test."""
    made: list[Server] = []

    def begin(*args: str, prelude: str = "", env: dict[str, str] | None = None, wait: bool = True) -> Server:
        server = launch(folder, *args, prelude=prelude, env=env)
        made.append(server)
        if wait:
            server.url = address(server)
        return server

    yield begin
    for server in made:
        server.kill()


@pytest.fixture(scope="session")
def shared(folder: Path) -> Iterator[Server]:
    server = launch(folder)
    server.url = address(server)
    yield server
    server.kill()


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The shared server; afterwards it is idle, and answers as it always does."""
    yield shared
    shared.until(shared.idle)
    answer = shared.http.post(
        f"{shared.url}/v1/completions", json={"prompt": "hello", "max_tokens": 3, "temperature": 0}
    )
    assert answer.status_code == 200, answer.text
    assert not any("Traceback" in line for line in shared.said), "\n".join(shared.said)


def events(text: str) -> list[Any]:
    """The data of server-sent events."""
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part, parse_constant=pytest.fail) for part in parts]


class Client:
    """Requests of the server, with what must hold of every answer checked."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["content"] = json.dumps(body)
        return self.server.http.post(self.server.url + path, **options)

    def ask(self, path: str, **body: Any) -> Any:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text, parse_constant=pytest.fail)

    def stream(self, path: str, **body: Any) -> list[Any]:
        answer = self.post(path, {**body, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        told = events(answer.text)
        assert told.pop() == "[DONE]"
        return told


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server)
