"""``inferflow chat`` at a terminal, where a person types, interrupts and leaves."""

from __future__ import annotations

import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.words import answers, chat_model

pytest.importorskip("termios", reason="there are no terminals of this kind here")

GUARD = 60.0  # seconds after which a terminal that says nothing is given up


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat") / "words")


class Terminal:
    """``inferflow chat`` at a terminal of its own: types, and waits for what appears."""

    def __init__(self, state: Path, *args: str, stdout: Any = None) -> None:
        import pty

        self.fd, there = pty.openpty()
        environ = {**os.environ, "XDG_STATE_HOME": str(state), "TERM": "dumb", "PYTHONUTF8": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inferflow.cli", "--no-config", "chat", *args],
            stdin=there, stdout=there if stdout is None else stdout, stderr=there, env=environ, start_new_session=True,
            preexec_fn=lambda: _own_terminal(there),
        )  # fmt: skip
        os.close(there)
        self.seen = ""

    def wait(self, text: str) -> str:
        """All until `text` appears, after what an earlier wait has found."""
        end = time.monotonic() + GUARD
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += self._read()
        before, _, self.seen = self.seen.partition(text)
        return before

    def _read(self) -> str:
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:  # Linux, once the other side is closed
            data = b""
        assert data, f"it has ended after {self.seen!r}"
        return data.decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, once the program waits for a key: Python looks for signals first and then waits, and what comes between the
        two it sees at the next key only."""
        end = time.monotonic() + GUARD
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < end
        self.type("\x03")

    def end(self) -> int:
        return self.process.wait(GUARD)


def _own_terminal(fd: int) -> None:
    """In the child: Ctrl-C at `fd` is for it."""
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)


Open = Callable[..., Terminal]


@pytest.fixture
def terminal(model: Path, tmp_path: Path, plain_signals: None) -> Iterator[Open]:
    opened: list[Terminal] = []

    def call(*args: str, **options: Any) -> Terminal:
        opened.append(Terminal(tmp_path / "state", "-m", str(model), *args, **options))
        return opened[-1]

    yield call
    for one in opened:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        os.close(one.fd)


def test_a_person_talks(terminal: Open, model: Path) -> None:
    first, second = answers(model, ["w5", "w7"], max_tokens=4)
    person = terminal("-n", "4")
    assert "/help" in person.wait("> ")
    person.type("w5\r")
    assert first in person.wait("> ")
    person.type("w7\r")
    assert second in person.wait("> ")
    person.type("/nonsense\r")
    assert "there is no such command" in person.wait("> ")  # an error ends nothing
    person.type("/exit\r")
    assert person.end() == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="nothing here says when a program waits for a key")
def test_control_c_stops_the_answer_and_not_the_program(terminal: Open, model: Path) -> None:
    person = terminal("--max-model-len", "60000", "--ignore-eos")
    person.wait("> ")
    person.type("w5\r")
    person.wait("w5\r\n")
    person.wait("w")  # the answer has begun
    person.type("\x03")
    person.wait("> ")
    person.type("/set max-tokens 4\r")
    person.wait("> ")
    person.type("/set ignore-eos false\r")
    person.wait("> ")
    person.type("/reset\r")
    person.wait("> ")
    person.type("w5\r")  # the engine is as good as new
    assert answers(model, ["w5"], max_tokens=4)[0] in person.wait("> ")
    person.type("w6 w7")
    person.wait("w6 w7")
    person.interrupt()
    assert "Ctrl-C again" in person.wait("> ")
    person.type("w5\r")  # what was typed before is gone
    person.wait("> ")
    person.interrupt()
    person.wait("> ")
    person.interrupt()
    assert person.end() == 0


def test_control_d_leaves(terminal: Open) -> None:
    person = terminal()
    person.wait("> ")
    person.type("\x04")
    assert person.end() == 0


def test_the_history_is_kept_for_its_owner(terminal: Open, tmp_path: Path) -> None:
    pytest.importorskip("readline")
    person = terminal("-n", "1")
    person.wait("> ")
    person.type("w5 w6\r")
    person.wait("> ")
    person.type("\x04")
    assert person.end() == 0
    file = tmp_path / "state" / "inferflow" / "history"
    assert "w5 w6" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = terminal("-n", "1")
    again.wait("> ")
    again.type("\x10")  # what the arrow up does
    again.wait("w5 w6")


def test_stdout_is_for_answers_alone(terminal: Open, model: Path, tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("wb") as out:
        person = terminal("-n", "4", "--stats", stdout=out)
        person.wait("> ")
        person.type("w5\r")
        person.wait("tokens/s]")
        person.type("\x04")
        assert person.end() == 0
    assert (tmp_path / "out.txt").read_text() == answers(model, ["w5"], max_tokens=4)[0] + "\n"
