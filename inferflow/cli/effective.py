"""``--show-config``, which every command has: what its options come to, and where each value is from.

A refusal of a value names the place in the config file, where the value is from there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from inferflow.errors import ArgumentError, InferflowError

from .config import SHOW, Config, keys_of, place_of
from .options import Recommended, dumps, lines_for_people

__all__ = ["configured"]

_SECRETS = ("api_key", "password")  # names of options whose values are not shown


def configured(command: click.Command) -> click.Command:
    """`command`, and those inside it, with ``--show-config``; a refusal of a value that is in the file says where."""
    clone = copy.copy(command)
    if isinstance(clone, click.Group):
        clone.commands = {name: configured(inner) for name, inner in clone.commands.items()}
    inner = command.callback
    if inner is None or (isinstance(clone, click.Group) and not clone.params):
        return clone
    help_text = "Print what the options come to and where each value is from, and do nothing else."
    clone.params = [*command.params, click.Option(["--show-config"], is_flag=True, help=help_text)]
    clone.callback = _calling(inner)
    return clone


def _calling(callback: Callable[..., Any]) -> Callable[..., Any]:
    def call(**values: Any) -> Any:
        ctx = click.get_current_context()
        if values.pop(SHOW):
            return None if ctx.invoked_subcommand else click.echo(shown(ctx))
        try:
            return callback(**values)
        except ArgumentError as error:
            named = (option for option in ctx.command.params if error.where in option.opts)
            place = place_of(ctx, next(named, None))
            error.where = f"{place}: {error.where}" if place else error.where
            raise

    return call


def shown(ctx: click.Context) -> str:
    """The effective values of a command's options, as a table, or as JSON where the command has ``--json``."""
    config = ctx.find_object(Config)
    rows = {key: _effective(ctx, option) for key, option in keys_of(ctx.command).items()}
    if any(isinstance(option, Recommended) for option in ctx.command.params):
        for name, value in recommended(ctx).items():
            key = name.replace("_", "-")
            if key in rows and rows[key][1] == "default":
                rows[key] = (value, "model")
    file = None if config is None else config.file
    if ctx.params.get("as_json"):
        values = {key: {"value": value, "from": source} for key, (value, source) in rows.items()}
        return dumps({"command": ctx.command_path, "config": file, "values": values})
    texts = {key: "-" if value is None else dumps(value) for key, (value, _) in rows.items()}
    widths = max(map(len, texts), default=0), min(40, max(map(len, texts.values()), default=0))
    lines = [f"config file: {file or 'none'}"]
    lines += [f"{key:<{widths[0]}}  {texts[key]:<{widths[1]}}  {source}" for key, (_, source) in rows.items()]
    return lines_for_people(lines)


def _effective(ctx: click.Context, option: click.Option) -> tuple[Any, str]:
    """The value of `option`, as JSON has it, and where it is from: ``flag``, the place in the file, or ``default``."""
    value = ctx.params.get(str(option.name))
    if value is not None and (option.hide_input or option.name in _SECRETS):
        value = "***"
    if not isinstance(value, bool | int | float | str | list | tuple | None):
        value = str(value if isinstance(value, Path) else getattr(value, "name", value))
    given = ctx.get_parameter_source(str(option.name))
    source = {ParameterSource.COMMANDLINE: "flag", ParameterSource.ENVIRONMENT: "environment"}
    return value, place_of(ctx, option) or source.get(given or ParameterSource.DEFAULT, "default")


def recommended(ctx: click.Context) -> Mapping[str, Any]:
    """The model's own sampling parameters; where the model is not here, a note says that they are not known."""
    from inferflow.runtime.recommended import recommended_params
    from inferflow.weights.locate import locate
    from inferflow.weights.open import open_source

    try:
        with closing(open_source(locate(ctx.params.get("model"), offline=True))) as source:
            return recommended_params(source.config)[0]
    except InferflowError as error:
        click.echo(f"note: what the model recommends is not known: {error}", err=True)
        return {}
