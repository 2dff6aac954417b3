"""The shell surface: ``inferflow COMMAND``. Commands are imported when called, so that ``--help`` is quick.

Exit status: 0 done, 1 refused (one sentence on stderr), 2 wrong usage, 130 interrupted, 143 terminated, 129 hung up. Answers
and tables go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from inferflow import __version__
from inferflow.errors import ArgumentError, InferflowError, did_you_mean, one_line, system_error

from .config import place_of, use_config
from .effective import configured

__all__ = ["cli", "main"]

_COMMANDS = {
    "bench": ("inferflow.cli.bench", "bench", "Measure how fast a model runs here."),
    "chat": ("inferflow.cli.chat", "chat", "Talk with a model, turn by turn."),
    "generate": ("inferflow.cli.generate", "generate", "Generate text from a prompt, streaming it."),
    "info": ("inferflow.cli.info", "info", "Say what a model is: spec, sizes, tensors, tokenizer."),
    "perplexity": ("inferflow.cli.perplexity", "perplexity", "Measure a model on a text, and against another model."),
    "pull": ("inferflow.cli.pull", "pull", "Download a model and print where it is."),
    "quantize": ("inferflow.cli.quantize", "quantize", "Make a model smaller: 3 to 8 bits a weight, in a directory."),
    "serve": ("inferflow.cli.serve", "serve", "Serve a model over HTTP, as OpenAI's API."),
    "spec": ("inferflow.cli.spec", "spec", "List, show, check, write and verify model specs."),
}


_CONFIG_HELP = (
    "What the flags of commands are, unless given. Default: inferflow.toml here, or in the user's config folder."
)


class _Lazy(click.Group):
    """A group whose commands are imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        import importlib

        module, attribute, _ = _COMMANDS[name]
        return configured(getattr(importlib.import_module(module), attribute))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = did_you_mean(args[0], _COMMANDS)
            if not close or not error.message.startswith("No such command"):
                raise
            raise click.UsageError(f"No such command '{args[0]}' ({close})", ctx) from None


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="inferflow")
@click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help=_CONFIG_HELP)
@click.option("--no-config", is_flag=True, help="Read no config file.")
@click.pass_context
def cli(ctx: click.Context, config: Path | None, no_config: bool) -> None:
    """Inferflow: an LLM inference engine in which a TOML file says what a model is."""
    if not no_config:
        use_config(ctx, config)
    elif config is not None:
        raise click.UsageError("--config and --no-config contradict each other: use one of them")


def main(argv: list[str] | None = None) -> None:
    """The console script."""
    prepare_streams()
    try:
        with ending_on_signals():
            status: Any = cli.main(argv, prog_name="inferflow", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.Abort:
        sys.exit(130)  # of a Ctrl-C; click has ended the line
    except KeyboardInterrupt:
        click.echo(err=True)
        sys.exit(130)
    except click.ClickException as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # since click 8.2
            error.show()  # the help, which has many lines
            sys.exit(2)
        ctx, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
        place = place_of(ctx, parameter)
        click.UsageError(one_line(f"{place and place + ': '}{error.format_message()}"), ctx).show()
        sys.exit(2)
    except ArgumentError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except InferflowError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except MemoryError as error:
        said = str(error).partition(" with shape")[0]
        click.echo(f"error: there is not enough memory{one_line(said and f' ({said})')}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        give_up_stdout()  # whoever read our output has left
        sys.exit(1)
    except OSError as error:
        give_up_stdout()
        where = str(error.filename or "stdout")  # whoever opened a file has said its name
        click.echo(f"error: {system_error(error, where)}", err=True)
        sys.exit(1)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the program as an exception does, so that what is half written is removed; a second one
    ends it at once. A signal that is ignored (``nohup``) stays so; only the main thread can arrange this."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows lacks SIGHUP
    numbers = [
        number for number in (getattr(signal, name) for name in names) if signal.getsignal(number) == signal.SIG_DFL
    ]

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        numbers = []
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def prepare_streams() -> None:
    """A closed stream becomes the null device; one that cannot hold every character (``LANG=C``) replaces what it cannot."""
    for name, mode in (("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as we run
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def give_up_stdout() -> None:
    """Where stdout no longer takes what was written, the interpreter must not complain about it at the end."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
