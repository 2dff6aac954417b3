"""``--plot FILE``: the option, and refusing early what could not be drawn after minutes of measuring."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from inferflow.errors import ArgumentError, UnsupportedError

__all__ = ["check_plot", "plot_option"]

F = TypeVar("F", bound=Callable[..., Any])


def plot_option(command: F) -> F:
    """``--plot FILE``."""
    kind = click.Path(path_type=Path, dir_okay=False, readable=False, writable=True)
    return click.option("--plot", type=kind, help="Draw the figures into this .png, .svg or .pdf.")(command)


def check_plot(path: Path) -> None:
    """Refuses early what could not be drawn after minutes of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        fix = "pip install 'inferflow[plot]'"
        raise UnsupportedError("matplotlib is not installed", where="--plot", fix=fix) from None
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ArgumentError(f"'{path.name}' is no picture's name", where="--plot", fix="end it in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise ArgumentError("there is no such folder", where=str(path.parent), fix="make it first")
    if not path.exists() and not os.access(path.absolute().parent, os.W_OK):
        fix = "check its permissions, or choose another place"
        raise ArgumentError("the folder cannot be written to", where=str(path.parent), fix=fix)
