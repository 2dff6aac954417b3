"""The picture of the loop, the figures, the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from .conftest import ROOT, Client, Server


def test_steps_are_told_as_they_happen(client: Client) -> None:
    server = client.server
    body = {"prompt": "hello", "max_tokens": 12, "ignore_eos": True, "n": 2}
    seen: dict[int, Any] = {}
    with server.http.stream("GET", f"{server.url}/live") as live:
        for line in live.iter_lines():
            if not line:
                continue
            event = json.loads(line.removeprefix("data: "))
            assert set(event) == {
                "steps", "running", "waiting", "blocks_used", "blocks", "tokens_per_s", "queue", "prefix_hit_rate"
            }  # fmt: skip
            if not seen and not event["steps"]:
                client_of(server).ask("/v1/completions", **body)
            seen |= {step["step"]: step for step in event["steps"]}
            if sum(step["decode"] for step in seen.values()) >= 20:
                break
    assert sorted(seen) == list(range(min(seen), max(seen) + 1))
    rows = {row[0] for step in seen.values() for row in step["rows"]}
    assert len(rows) == 2
    assert any(step["prefill"] for step in seen.values())
    assert all(len(row) == 4 for step in seen.values() for row in step["rows"])


def client_of(server: Server) -> Client:
    return Client(server)


def test_an_idle_loop_is_silent(client: Client) -> None:
    """After the first events, which say how things are."""
    server = client.server
    with server.http.stream("GET", f"{server.url}/live", timeout=3) as live:
        events = []
        try:
            for line in live.iter_lines():
                events += [json.loads(line[6:])] if line else []
        except Exception as error:
            assert "timed out" in str(error)  # noqa: PT017 - it ends so, or with an event too many
    assert 1 <= len(events) <= 40
    assert events[-1]["running"] == events[-1]["tokens_per_s"] == 0


def test_metrics(client: Client) -> None:
    """In Prometheus' format: every family has a type, every line a number, and what is counted is so."""
    server = client.server
    before = {
        name: server.metric(name) for name in ("inferflow_generated_tokens_total", "inferflow_answer_seconds_count")
    }
    told = client.ask("/v1/completions", prompt=["a", "b c"], max_tokens=5, n=2, ignore_eos=True)
    assert server.metric("inferflow_generated_tokens_total") == before["inferflow_generated_tokens_total"] + 20
    assert server.metric("inferflow_answer_seconds_count") == before["inferflow_answer_seconds_count"] + 2
    assert told["usage"]["completion_tokens"] == 20
    answer = server.http.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", answer.text, re.MULTILINE))
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            name, value = re.fullmatch(r'([a-z_]+)(?:\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})? (\S+)', line).groups()  # type: ignore[union-attr]
            assert name in types or re.sub(r"_(bucket|sum|count)$", "", name) in types, line
            float(value)
    buckets = re.findall(r'^inferflow_answer_seconds_bucket\{le="(\S+)"\} (\d+)$', answer.text, re.MULTILINE)
    assert [int(count) for _, count in buckets] == sorted(int(count) for _, count in buckets)
    assert (buckets[-1][0], float(buckets[-1][1])) == ("+Inf", server.metric("inferflow_answer_seconds_count"))
    assert re.search(r'inferflow_http_requests_total\{route="/v1/completions",status="200"\} \d+', answer.text)


def test_the_commands_of_the_readme(server: Server) -> None:
    """Those that ask are run as they stand, but for the port."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    text = (ROOT / "README.md").read_text("utf-8")
    block = next(block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "inferflow serve" in block)
    serve, *asks = block.strip().splitlines()
    assert serve.startswith("inferflow serve ")
    answers = []
    for line in asks:
        command = line.replace("http://127.0.0.1:8000", server.url).replace("curl", "curl -sS --fail-with-body")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done
        answers.append(done.stdout)
    assert json.loads(answers[0])["choices"][0]["message"]["content"] is not None
    assert answers[1].endswith("data: [DONE]\n\n")
    assert "inferflow_up 1" in answers[2]


def test_the_page(client: Client) -> None:
    answer = client.server.http.get(client.server.url)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>" in answer.text
