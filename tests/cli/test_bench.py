"""``inferflow bench``: the report for machines and the table for people, the picture, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inferflow.cli.main import main
from tests.tiny import write

SMALL = ("--prefill", "9", "--decode", "3", "--repeat", "2")
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> Run:
    model = str(write(tmp_path_factory.mktemp("bench")))

    def call(*args: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as done:
            main(["bench", *SMALL, *([] if "-m" in args else ["-m", model]), *args])
        seen = capsys.readouterr()
        assert (done.value.code or 0) == status, seen.err
        assert "Traceback" not in seen.err
        return seen.out if status == 0 else seen.err

    return call


def test_the_report(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "speed.png"
    report = json.loads(run("--batch", "3,2", "--json", "--plot", str(picture)))
    assert report["spec"] == "llama"
    assert report["engine"] in ("native", "reference")
    assert 0 < report["load_s"] <= report["first_token_s"]
    assert report["prefill"]["tokens"] == 9
    assert [row["sequences"] for row in report["decode"]] == [1, 2, 3]
    for row in (report["prefill"], *report["decode"]):
        assert len(row["runs"]) == 2
        assert min(row["runs"]) <= row["tokens_per_s"] <= max(row["runs"])
        assert row["runs"][0] > 0
    assert len(report["read_runs"]) == 3
    speed = report["weight_bytes_per_token"] * report["decode"][0]["tokens_per_s"] / 1e9
    assert report["decode_gb_per_s"] == pytest.approx(speed, abs=1e-3)
    assert report["share_of_read"] == pytest.approx(speed / report["read_gb_per_s"], abs=1e-3)
    assert report["peak_bytes"] > 10e6
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 5000


def test_the_table(run: Run) -> None:
    lines = run("--batch", "1,4").splitlines()
    assert [line[:12].strip() for line in lines[2:]] == [
        "first token", "peak memory", "prefill 9", "decode × 1", "decode × 4", "weights", "decode reads", "memory reads",
    ]  # fmt: skip
    assert all("tokens/s" in line for line in lines[4:7])


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--batch", "1,x"], 2, "no list of numbers"),
        (["--batch", "1,\x1b]0;x"], 2, "'1,\\x1b]0;x' is no list of numbers"),
        (["--prefill", "1000000"], 2, "--prefill: a sequence would have 1000001 tokens"),
        (["--decode", "100"], 2, "--decode: a sequence would have"),
        (["--plot", "dd.png"], 2, "File 'dd.png' is a directory"),
        (["--batch", "0"], 2, "from 1 to 1024"),
        (["--decode", "0"], 2, "0 is not in the range"),
        (["--plot", "speed.txt"], 2, "end it in .png"),
        (["--plot", "no/such/folder/speed.png"], 2, "there is no such folder"),
        (["-m", "nowhere"], 1, "there is no such model"),
    ],
)
def test_refusals(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], status: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dd.png").mkdir()
    assert words in run(*args, status=status)


def test_a_picture_that_cannot_be_written_is_refused_before_anything_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (tmp_path / "there.png").touch()
    assert "is not writable" in run("--plot", str(tmp_path / "there.png"), "-m", "nowhere", status=2)
    assert "cannot be written to" in run("--plot", str(tmp_path / "new.png"), "-m", "nowhere", status=2)


def test_the_figures_survive_a_picture_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(SystemExit) as done:
        main(
            [
                "bench",
                *SMALL,
                "-m",
                str(write(tmp_path / "m")),
                "--batch",
                "1",
                "--json",
                "--plot",
                str(tmp_path / "x.png"),
            ]
        )
    seen = capsys.readouterr()
    assert done.value.code == 1
    assert json.loads(seen.out)["decode"]
    assert seen.err.startswith(f"error: {tmp_path / 'x.png'}: No space left on device (free some space")


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--plot", "x.png", "-m", "nowhere", status=1).strip() == (
        "error: --plot: matplotlib is not installed (pip install 'inferflow[plot]')"
    )
