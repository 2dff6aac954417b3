"""``inferflow bench serve``: the report for machines and the table for people, the picture, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferflow.cli.main import main
from tests.runtime.test_load_http import chunk, serving, stream
from tests.tiny import write

SMALL = ("--requests", "5", "--prompt", "uniform:2:9", "--output", "pareto:1:2:8", "--repeat", "2", "--warmup", "1")
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> Run:
    model = str(write(tmp_path_factory.mktemp("serve")))

    def call(*args: str, status: int = 0) -> str:
        own = ["-m", model] if "-m" not in args and "--url" not in args else []
        with pytest.raises(SystemExit) as done:
            main(["bench", "serve", *SMALL, *own, *args])
        seen = capsys.readouterr()
        assert (done.value.code or 0) == status, seen.err
        assert "Traceback" not in seen.err
        return seen.out if status == 0 else seen.err

    return call


def test_policies_side_by_side(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "load.png"
    policies = "fcfs,prefill-first,mlfq"
    report = json.loads(run("--policy", policies, "--clients", "2,1", "--json", "--plot", str(picture)))
    assert (report["prompt"], report["output"], report["sla"]) == (
        "uniform:2:9", "pareto:1:2:8", {"prompt": 512, "output": 4},
    )  # fmt: skip
    assert report["engine"] in ("native", "reference")
    assert [load["clients"] for load in report["loads"]] == [1, 2]
    for load in report["loads"]:
        assert list(load["policies"]) == policies.split(",")
        tokens = set()
        for figures in load["policies"].values():
            assert len(figures["runs"]) == 2
            assert all((run["requests"], run["failed"]) == (5, 0) for run in figures["runs"])
            middle = sum(run["ttft_s"]["p95"] for run in figures["runs"]) / 2
            assert figures["ttft_s"]["p95"] == pytest.approx(middle)
            tokens.add(tuple(round(run["tokens_per_s"] * run["seconds"]) for run in figures["runs"]))
        assert len(tokens) == 1, "policies had different requests"
        assert len(set(tokens.pop())) == 2, "rounds had the same requests"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 5000


def test_the_table(run: Run) -> None:
    lines = run("--policy", "fcfs,static", "--rate", "400").splitlines()
    assert "uniform:2:9" in lines[1]
    assert lines[3].split() == ["400", "requests", "a", "second", "fcfs", "static"]
    assert [line[:14].strip() for line in lines[4:8]] == ["requests", "within SLA", "new tokens", "all tokens"]
    assert all(line.count("×") == 1 for line in lines[4:5])
    assert [line[14:20].strip() for line in lines[8:24]] == ["mean", "p50", "p95", "p99"] * 4
    assert len(lines) == 24
    assert "all at once" in run()


def test_a_server(run: Run) -> None:
    def says(body: dict[str, Any]) -> tuple[int, bytes]:
        if len(body["prompt"]) == 9:
            return 429, b"full"
        return 200, stream(*(chunk("x") for _ in range(body["max_tokens"])))

    args = ("--prompt", "uniform:8:9", "--seed", "3")
    with serving(says) as (url, asked):
        report = json.loads(run("--url", url, "--json", *args))
        assert "failed: " in run("--url", url, "-m", "other", "--api-key", "k", *args)
    assert (report["model"], report["url"]) == ("m", url)
    figures = report["loads"][0]["policies"]["server"]
    assert 0 < figures["failed"] < 5
    assert figures["requests_per_s"] > 0
    assert {(a["model"], a["authorization"]) for a in asked} == {("m", None), ("other", "Bearer k")}
    with serving(lambda body: (503, b"starting")) as (url, _):
        assert "no request was answered: status 503: starting" in run("--url", url, status=1)


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--rate", "1,x"], 2, "no list of numbers"),
        (["--rate", "0"], 2, "above 0"),
        (["--rate", "nan"], 2, "above 0"),
        (["--clients", "1.5"], 2, "no list of numbers"),
        (["--clients", "2", "--rate", "2"], 2, "by --rate or from --clients"),
        (["--prompt", "zipf:3"], 2, "--prompt: 'zipf:3' are no lengths"),
        (["--output", "fixed:0"], 2, "--output: 'fixed:0' are no lengths"),
        (["--prompt", "fixed:200"], 2, "--prompt: a sequence would have 208 tokens"),
        (["--policy", "fcfs,lifo"], 2, "there is no policy 'lifo'"),
        (["--sla", "512"], 2, "write 512:4"),
        (["--sla", "0:1"], 2, "write 512:4"),
        (["--blocks", "1", "--prompt", "fixed:70"], 1, "no request was answered"),
        (["--url", "nowhere"], 2, "--url: 'nowhere' is no server's URL"),
        (["--plot", "speed.txt"], 2, "end it in .png"),
        (["-m", "nowhere"], 1, "there is no such model"),
    ],
)
def test_refusals(run: Run, args: list[str], status: int, words: str) -> None:
    assert words in run(*args, status=status)


def test_options_of_bench_are_not_those_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["bench", "--prefill", "9", "serve"])
    assert done.value.code == 2
    assert "--prefill is of bench alone" in capsys.readouterr().err
