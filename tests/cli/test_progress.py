"""The progress line: on terminals only, and gone afterwards."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from inferflow.cli.progress import progress_line, steps_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with progress_line(stream) as draw:
        assert draw is None
    assert stream.getvalue() == ""


def test_the_line_shows_phase_and_bytes_and_is_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("inferflow.cli.progress.time", SimpleNamespace(monotonic=lambda: 7.0))
    stream = Terminal()
    with progress_line(stream) as draw:
        assert draw is not None
        draw("download", 1_000_000, None)
        draw("download", 1_000_001, None)  # too soon to be drawn
        draw("extract", 5_000_000, 10_000_000)
        draw("extract", 10_000_000, 10_000_000)
    lines = stream.getvalue().split("\r\x1b[K")
    assert lines == [
        "",
        "downloading  1.0 MB",
        "unpacking    [###############...............] 5.0 / 10.0 MB",
        "unpacking    [##############################] 10.0 / 10.0 MB",
        "",
    ]


def test_the_line_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    with progress_line(stream) as draw:
        assert draw is not None
        draw("download", 5, 10)
    assert all(len(line) < 20 for line in stream.getvalue().split("\r\x1b[K"))


def test_steps_show_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr("inferflow.cli.progress.time", clock)
    stream = Terminal()
    with steps_line(stream, "evaluating") as step:
        for done, total, clock.now in (
            (0, 10, 100.0),
            (1, 10, 102.5),
            (2, 10, 102.55),  # too soon to be drawn
            (10, 10, 102.6),
            (10, 100, 140.0),
            (10, 10000, 200.0),
            (40_000_000, 134_515_008, 300.0),
            (9, 10000, 400.0),  # too little to tell
        ):
            step(done, total)
    lines = stream.getvalue().split("\r\x1b[K")
    assert lines == [
        "",
        "evaluating   [..............................] 0 / 10",
        "evaluating   [###...........................] 1 / 10, 22 s left",
        "evaluating   [##############################] 10 / 10",
        "evaluating   [###...........................] 10 / 100, 6:00 min left",
        "evaluating   [..............................] 10 / 10000, 27:45 h left",
        "evaluating   [########......................] 40 / 135 M, 7:53 min left",
        "evaluating   [..............................] 9 / 10000",
        "",
    ]


def test_steps_are_not_drawn_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with steps_line(stream, "evaluating") as step:
        step(1, 2)
    assert stream.getvalue() == ""
