"""What a person types: lines from a terminal, with a history, or from a pipe; several may make one message."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from inferflow.errors import ArgumentError

__all__ = ["LeftError", "Lines", "message", "state_dir"]

MAX_LINE = 64 << 20  # bytes
HISTORY = 1000  # lines
QUOTE = '"""'
PROMPT, MORE = "> ", "... "


class LeftError(Exception):
    """The person has left: Ctrl-D, Ctrl-C twice, or the end of what was piped in."""


class Lines:
    """Lines of stdin. `interactive`: a person types them at a prompt, with what `history` remembers."""

    def __init__(self) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        self.reading = False  # somebody is at the prompt
        self.interrupted = False  # the last prompt ended with Ctrl-C
        self.asked = False  # a Ctrl-C came since the last prompt

    def read(self, prompt: str) -> str:
        """The next line, without its end. Raises LeftError; and KeyboardInterrupt for a Ctrl-C that is the first, or that takes
        back what was typed."""
        if not self.interactive:
            return self._piped()
        self.asked = False
        try:
            self.reading = True
            line = self._typed(prompt)
        except EOFError:
            click.echo(err=True)
            raise LeftError from None
        except KeyboardInterrupt:
            click.echo(err=True)
            if self.interrupted:
                raise LeftError from None
            self.interrupted = True
            raise
        finally:
            self.reading = False
        self.interrupted = False
        return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _typed(self, prompt: str) -> str:
        if sys.stdout.isatty():
            return input(prompt)
        click.echo(prompt, nl=False, err=True)  # stdout is for answers alone
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _piped(self) -> str:
        data = b"" if sys.stdin is None else sys.stdin.buffer.readline(MAX_LINE + 1)
        if not data:
            raise LeftError
        if len(data) > MAX_LINE:
            raise ArgumentError(f"a line holds more than {MAX_LINE >> 20} MiB", where="stdin", fix="give shorter ones")
        return data.decode("utf-8", "replace").rstrip("\r\n")

    @contextlib.contextmanager
    def history(self) -> Iterator[None]:
        """Inside, the arrow keys find earlier lines, also of earlier conversations. They are kept in the user's folder for
        state, for his eyes only; where that cannot be, they are not kept."""
        try:
            import readline
        except ImportError:  # not on Windows
            yield
            return
        if not self.interactive:
            yield
            return
        path = state_dir() / "history"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(0o600)
            path.chmod(0o600)
            readline.read_history_file(path)
        readline.set_history_length(HISTORY)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                readline.write_history_file(path)
                path.chmod(0o600)


def message(lines: Lines) -> str:
    """The next message: a line; several, each but the last with a backslash at its end; or all between three quotes, which
    begin a line, and three that end one. Raises ArgumentError where what is piped in ends inside one."""
    line = lines.read(PROMPT)
    if not line.startswith(QUOTE):
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{_more(lines)}"
        return line
    text = line.removeprefix(QUOTE)
    while not text.endswith(QUOTE):
        text = f"{text}\n{_more(lines)}"
    return text.removesuffix(QUOTE).strip("\n")


def _more(lines: Lines) -> str:
    try:
        return lines.read(MORE)
    except LeftError:
        if lines.interactive:
            raise
        fix = f"end it with {QUOTE}, or with a line that has no backslash at its end"
        raise ArgumentError("it ends inside a message", where="stdin", fix=fix) from None


def state_dir(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """The user's folder for what programs remember: ``$XDG_STATE_HOME``, or the platform's, with ``inferflow`` appended."""
    if platform in ("win32", "darwin"):
        return Path(click.get_app_dir("inferflow"))
    return Path(environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "inferflow"
