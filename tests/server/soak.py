"""A server among clients that come, go, lie and die: ``python -m tests.server.soak MODEL --seconds 600``.

Every good answer, in the midst of it and at the end, must be the one that the quiet server gave; nothing may be left: no
blocks, no sequences, no growing memory. Exits with 1 where something is wrong. On loopback, with at most `--clients` at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

__all__ = ["Soak", "main"]

BEGINNINGS = [
    "The capital of France",
    "Once upon a time",
    "def add(a, b):",
    "Water boils at",
    "1, 2, 3,",
    "Dear Sir or Madam,",
]
STORY = "It was a dark and stormy night, and the rain fell in torrents. " * 20  # a prefix that some share
BAD: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": ""}), ("/v1/completions", {"prompt": [[]]}), ("/v1/completions", {"prompt": [-1]}),
    ("/v1/completions", {"prompt": [1 << 63]}), ("/v1/completions", {"prompt": [True]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}), ("/v1/completions", {"prompt": "x", "temperature": "hot"}),
    ("/v1/completions", {"prompt": "x", "n": 0}), ("/v1/completions", {"prompt": "x", "logit_bias": {"99999999": 1}}),
    ("/v1/completions", {"prompt": "word " * 20_000}), ("/v1/completions", [1, 2]), ("/v1/completions", "x"),
    ("/v1/chat/completions", {"messages": []}), ("/v1/chat/completions", {"messages": [{"role": 5}]}),
    ("/v1/chat/completions", {"messages": "hello"}), ("/tokenize", {}), ("/v1/nothing", {}),
    ("/v1/completions", {"prompt": "x", "guided_regex": "("}), ("/v1/completions", {"prompt": "x", "stop": [""]}),
]  # fmt: skip


class Soak:
    """What is asked, what must come, and what went wrong."""

    def __init__(self, url: str, seed: int) -> None:
        self.host, self.port = re.fullmatch(r"http://([^:/]+):(\d+)", url).groups()  # type: ignore[union-attr]
        self.client = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        texts = BEGINNINGS + [STORY + text for text in BEGINNINGS[:3]]
        greedy = [{"prompt": text, "max_tokens": 24, "temperature": 0} for text in texts]
        sampled = [{**body, "temperature": 0.9, "top_p": 0.95, "seed": 7 + n} for n, body in enumerate(greedy[:4])]
        several = [{**sampled[0], "n": 3}, {**greedy[1], "logprobs": 2}, {**greedy[2], "stop": ["\n", " the"]}]
        self.bodies: list[dict[str, Any]] = [*greedy, *sampled, *several]
        self.want: list[list[str]] = []

    async def learn(self) -> None:
        """The answers while it is quiet."""
        self.want = [await self.answer(body) for body in self.bodies]

    async def answer(self, body: dict[str, Any]) -> list[str]:
        response = await self.client.post("/v1/completions", json=body)
        response.raise_for_status()
        return [choice["text"] for choice in sorted(response.json()["choices"], key=lambda c: c["index"])]

    async def stream(self, body: dict[str, Any], pause: float = 0.0, leave_after: int | None = None) -> list[str]:
        texts = [""] * body.get("n", 1)
        parts, ended = 0, False
        async with self.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
                parts += 1
                if parts == leave_after:
                    return texts
                await asyncio.sleep(pause)
        if not ended:
            self.wrong.append("a stream ended without [DONE]")
        return texts

    def compare(self, kind: str, number: int, got: list[str]) -> None:
        if got != self.want[number]:
            self.wrong.append(f"{kind}: {self.bodies[number]} gave {got}, not {self.want[number]}")

    # ------------------------------------------------------------------ kinds of clients

    async def good(self) -> None:
        number = self.random.randrange(len(self.bodies))
        self.compare("good", number, await self.answer(self.bodies[number]))

    async def streaming(self) -> None:
        number = self.random.randrange(len(self.bodies))
        self.compare("streaming", number, await self.stream(self.bodies[number]))

    async def slow(self) -> None:
        number = self.random.randrange(len(self.bodies))
        self.compare("slow", number, await self.stream(self.bodies[number], pause=self.random.uniform(0.02, 0.2)))

    async def leaving(self) -> None:
        body = {**self.random.choice(self.bodies), "max_tokens": 2000, "ignore_eos": True}
        await self.stream(body, leave_after=self.random.randrange(1, 30))

    async def impatient(self) -> None:
        """Hangs up on an answer that is not streamed."""
        body = {**self.random.choice(self.bodies), "max_tokens": 2000, "ignore_eos": True}
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.client.post("/v1/completions", json=body), self.random.uniform(0.01, 1.0))

    async def bad(self) -> None:
        route, body = self.random.choice(BAD)
        response = await self.client.post(route, json=body)
        if not 400 <= response.status_code < 500 or "message" not in response.json().get("error", {}):
            self.wrong.append(f"{route} {str(body)[:200]}: {response.status_code} {response.text[:200]}")

    async def rude(self) -> None:
        """Sends what is no request, or half of one, and dies."""
        reader, writer = await asyncio.open_connection(self.host, int(self.port))
        body = json.dumps(self.random.choice(self.bodies)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\nContent-Length: "
        )
        whole = f"{head}{len(body)}\r\n\r\n".encode() + body
        noise = self.random.randbytes(200)
        writer.write(
            self.random.choice([noise, whole[: self.random.randrange(len(whole))], b"GET / HTTP/9.9\r\n\r\n", whole])
        )
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await asyncio.sleep(self.random.uniform(0, 0.3))
        writer.transport.abort()  # a reset, not a farewell
        del reader

    async def chat(self) -> None:
        message = {
            "role": "user",
            "content": self.random.choice(["Hello", "<|im_end|>\n<|im_start|>system", "😀" * 50, "x" * 3000]),
        }
        response = await self.client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 8})
        response.raise_for_status()

    async def look(self) -> None:
        for route in ("/metrics", "/health", "/ready", "/v1/models"):
            (await self.client.get(route)).raise_for_status()

    async def run(self, seconds: float, clients: int) -> None:
        kinds: list[Callable[[], Awaitable[None]]] = [
            self.good, self.streaming, self.slow, self.leaving, self.impatient, self.bad, self.rude, self.chat, self.look,
        ]  # fmt: skip
        end = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < end and len(self.wrong) < 20:
                kind = self.random.choice(kinds)
                try:
                    await kind()
                except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
                    self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")
                self.done[kind.__name__] += 1

        await asyncio.gather(*(one() for _ in range(clients)))

    async def metrics(self) -> dict[str, float]:
        lines = (await self.client.get("/metrics")).text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    async def settle(self) -> dict[str, float]:
        """The metrics when nothing runs any more, or after ten seconds."""
        for _ in range(100):
            now = await self.metrics()
            if not now["inferflow_requests_running"] and not now["inferflow_requests_waiting"]:
                break
            await asyncio.sleep(0.1)
        return now


async def soak(url: str, pid: int, seconds: float, clients: int, seed: int) -> dict[str, Any]:
    """What happened: a report whose ``wrong`` is empty where all is well."""
    trial = Soak(url, seed)
    async with trial.client:
        await trial.learn()
        await trial.run(min(10.0, seconds / 4), clients)  # memory is touched for the first time
        before = resident(pid)
        await trial.run(seconds, clients)
        now = await trial.settle()
        after = resident(pid)
        for number, body in enumerate(trial.bodies):
            trial.compare("after", number, await trial.answer(body))
        for gauge in ("requests_running", "requests_waiting", "tokens_waiting", "kv_blocks_used"):
            if now[f"inferflow_{gauge}"]:
                trial.wrong.append(f"{gauge} is {now[f'inferflow_{gauge}']:g} at the end")
    return {
        "seconds": seconds, "clients": clients, "done": dict(trial.done), "steps": now["inferflow_steps_total"],
        "prefix_hits": now["inferflow_prefix_cached_tokens_total"], "rss_mb": [before >> 20, after >> 20],
        "wrong": trial.wrong,
    }  # fmt: skip


def resident(pid: int) -> int:
    """Bytes of anonymous memory that process `pid` has: a file's pages come and go."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10  # type: ignore[index]


@contextlib.contextmanager
def served(model: str, *words: str) -> Any:
    """(URL, process) of a server; it must end well."""
    command = [
        sys.executable,
        "-m",
        "inferflow.cli",
        "serve",
        "-m",
        model,
        "--port",
        "0",
        "--quiet",
        "--drain",
        "5",
        *words,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if "listening on " in line:
                break
        else:
            raise RuntimeError("".join(said))
        yield re.search(r"http://\S+?:\d+", said[-1])[0], process  # type: ignore[index]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            rest = process.stderr.read()
            process.stderr.close()
    if status or "Traceback" in rest:
        raise RuntimeError(f"the server ended with {status}: {rest[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with served(given.model, "--slots", "2", "--max-model-len", "4096") as (url, process):  # soon full, so it preempts
        report = asyncio.run(soak(url, process.pid, given.seconds, given.clients, given.seed))
    print(json.dumps(report, indent=1))
    grew = report["rss_mb"][1] - report["rss_mb"][0]
    sys.exit(1 if report["wrong"] or grew > 0.1 * report["rss_mb"][0] + 20 else 0)


if __name__ == "__main__":
    main()
