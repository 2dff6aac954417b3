"""The config file ``inferflow.toml``: all that flags can say, so that they need not be said.

A key is a flag's name without its dashes in front (``max-tokens``, or ``max_tokens``). At the top of the file it holds for
every command that has the flag, in ``[COMMAND]`` (``[spec.show]``) for that one, and in ``[models.NAME]`` for ``-m NAME``,
where ``model`` says which model is meant. What is written later in this list wins; a flag wins over all of it.

It works through click's `default_map`, so it knows no command: what options a command has says what keys there may be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from inferflow.errors import ArgumentError, SpecError, did_you_mean
from inferflow.spec.document import MAX_BYTES, Leaf, Node, Table, Where, parse_toml

__all__ = ["SHOW", "Config", "keys_of", "model_of", "named_model", "place_of", "read_config", "use_config"]

FILE = "inferflow.toml"
MODELS = "models"
SHOW = "show_config"


@dataclass(frozen=True)
class Setting:
    """A value that the file gives, and its place there."""

    value: Any
    where: Where


@dataclass(frozen=True)
class Config:
    """A config file whose keys and types are right for `commands`."""

    file: str
    table: Table
    commands: Mapping[str, click.Command]

    def __post_init__(self) -> None:
        everything = {key for command in self.paths.values() for key in keys_of(command)}
        _check_keys(self.table, everything, (*self.commands, MODELS))
        named = self.table.table(MODELS)
        _check_keys(named, (), named)
        for name in named:
            table = named.table(name)
            _check_keys(table, everything, ())
            if "model" not in table:
                raise ArgumentError(
                    "it names no model", where=str(table.where), fix='add model = "org/name", or a path'
                )
        for path, command in self.paths.items():
            _check_keys(self._table(path), keys_of(command), _inside(command))
            for model in (None, *named):
                self.settings(path, command, model)

    @cached_property
    def paths(self) -> dict[tuple[str, ...], click.Command]:
        """Every command, by the words that call it."""
        found: dict[tuple[str, ...], click.Command] = {(name,): command for name, command in self.commands.items()}
        pending = list(found.items())
        while pending:
            path, command = pending.pop()
            pending += (inner := [((*path, name), one) for name, one in _inside(command).items()])
            found |= inner
        return found

    @cached_property
    def models(self) -> dict[str, str]:
        """What MODEL each name stands for."""
        named = self.table.table(MODELS)
        return {name: _plain(named.table(name)["model"]) for name in named}

    def settings(self, path: tuple[str, ...], command: click.Command, model: str | None) -> dict[str, Setting]:
        """What the file says for `command`, which is called by the words `path`, by the names of its parameters; `model` is
        the table of a model that is used. Raises ArgumentError for a value of the wrong type."""
        tables = [self.table, self._table(path)]
        if model is not None:
            tables.append(self.table.table(MODELS).table(model))
        options = keys_of(command)
        found: dict[str, Setting] = {}
        for table in tables:
            for key, leaf in _leaves(table).items():
                if key in options:
                    found[str(options[key].name)] = Setting(_value(key, leaf, options[key]), leaf.where)
        return found

    def _table(self, path: tuple[str, ...]) -> Table:
        """What is under the headings `path`; nothing, where the first of them is an option's name, too, and has a value."""
        table = self.table
        for word in path:
            node = table.get(word)
            table = node if isinstance(node, Table) else Table({})
        return table

    def defaults(self, path: tuple[str, ...], command: click.Command) -> dict[str, Any]:
        """click's `default_map` for `command` and those inside it."""
        own = {name: setting.value for name, setting in self.settings(path, command, None).items()}
        return own | {name: self.defaults((*path, name), one) for name, one in _inside(command).items()}


# ---------------------------------------------------------------------- reading


def use_config(ctx: click.Context, file: Path | None) -> None:
    """Make `file`, or else the first of `usual_files` that is there, what the group's commands default to."""
    group = ctx.command
    chosen = file or next((path for path in usual_files() if path.is_file()), None)
    if chosen is None or not isinstance(group, click.Group):
        return
    found = {name: group.get_command(ctx, name) for name in group.list_commands(ctx)}
    config = read_config(chosen, {name: command for name, command in found.items() if command is not None})
    ctx.obj = config
    ctx.default_map = {name: config.defaults((name,), command) for name, command in config.commands.items()}


def usual_files() -> list[Path]:
    """Where the file is looked for: here, then in the user's folder for configuration."""
    return [Path(FILE), Path(click.get_app_dir("inferflow")) / FILE]


def read_config(path: Path, commands: Mapping[str, click.Command]) -> Config:
    """The config in `path`. Raises ArgumentError, with line and column, for what is wrong in it."""
    try:
        with path.open("rb") as file:
            data = file.read(4 * MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ArgumentError(reason, where=str(path), fix="check its name and permissions, or use --no-config") from None
    try:
        return Config(str(path), parse_toml(data.decode("utf-8").replace("\r\n", "\n"), str(path)), commands)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ArgumentError("it is not UTF-8", where=f"{path}:{line}", fix="save it as UTF-8") from None
    except SpecError as error:
        raise ArgumentError(error.reason, where=error.where, fix=error.fix) from None


def _inside(command: click.Command) -> Mapping[str, click.Command]:
    return command.commands if isinstance(command, click.Group) else {}


def keys_of(command: click.Command) -> dict[str, click.Option]:
    """The options of `command` that a file may give, by their keys."""
    found = {}
    for option in command.params:
        if isinstance(option, click.Option) and option.expose_value and option.name != SHOW:
            found[_key(option)] = option
    return found


def _key(option: click.Option) -> str:
    return max(option.opts, key=len).lstrip("-")


def _flag(key: str) -> str:
    return key.replace("_", "-")


def _check_keys(table: Table, known: Collection[str], tables: Collection[str]) -> None:
    """Raises ArgumentError for a key of `table` that is neither a `known` one, with a value, nor one of `tables`."""
    for key, node in table.items():
        if (key in tables) if isinstance(node, Table) else (_flag(key) in known):
            continue
        if not isinstance(node, Table) and key in tables:
            raise _wrong(key, node, f"a table: [{key}]")
        if isinstance(node, Table) and _flag(key) in known:
            raise _wrong(key, node, f"{key} = …")
        what, words = "table" if isinstance(node, Table) else "option", sorted({*known, *tables})
        fix = did_you_mean(_flag(key), words) or (f"there are {', '.join(words)}" if words else "leave it out")
        raise ArgumentError(f"there is no {what} '{key}' here", where=str(node.where), fix=fix)


def _leaves(table: Table) -> dict[str, Leaf]:
    """The values of `table`, by their keys as flags spell them."""
    found: dict[str, Leaf] = {}
    for key, node in table.items():
        if isinstance(node, Leaf):
            if _flag(key) in found:
                raise ArgumentError(f"'{_flag(key)}' is given twice", where=str(node.where), fix="leave one out")
            found[_flag(key)] = node
    return found


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", list: "a list"}


def _value(key: str, node: Node, option: click.Option) -> Any:
    """The value of `node`, if its type is one that `option` takes. What is in range, click itself says."""
    want: type = str
    if (option.is_flag and option.is_bool_flag) or isinstance(option.type, click.types.BoolParamType):
        want = bool
    elif option.count or isinstance(option.type, click.types.IntParamType):
        want = int
    elif isinstance(option.type, click.types.FloatParamType):
        want = float
    if option.multiple or option.nargs != 1:
        many = _plain(node)
        if not isinstance(many, list) or not all(_is(want, item) for item in many):
            raise _wrong(key, node, f"a list, each {_KINDS[want]}")
        return many
    if not _is(want, _plain(node)):
        raise _wrong(key, node, _KINDS[want])
    return _plain(node)


def _is(want: type, value: object) -> bool:
    return type(value) is want or (want is float and type(value) is int)


def _plain(node: Node) -> Any:
    if isinstance(node, Table):
        return {key: _plain(inner) for key, inner in node.items()}
    return [_plain(item) for item in node.value] if isinstance(node.value, list) else node.value


def _wrong(key: str, node: Node, want: str) -> ArgumentError:
    kind = "a table" if isinstance(node, Table) else _KINDS[type(node.value)]
    return ArgumentError(f"'{key}' is {kind}", where=str(node.where), fix=f"write {want}")


# ---------------------------------------------------------------------- what a context says


def model_of(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """An option's callback: a name of ``[models.NAME]`` becomes the model that it stands for."""
    config = ctx.find_object(Config)
    return config.models.get(value, value) if config is not None and value is not None else value


def named_model(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The same, of the model that a command runs: all else that its table says becomes what the command's options default to.
    The parameter must be eager, to come before those; of two, the one that is given counts."""
    if value is not None and ctx.meta.setdefault(_meta(ctx), value) == value:
        chosen = {name: setting.value for name, setting in _settings(ctx).items()}
        ctx.default_map = {**(ctx.default_map or {}), **chosen}
    return model_of(ctx, parameter, value)


def place_of(ctx: click.Context | None, parameter: click.Parameter | None) -> str:
    """``file:line:column`` of the value of `parameter`, if that is from the file; else an empty string."""
    found = None if ctx is None or parameter is None else _settings(ctx).get(str(parameter.name))
    if found is None or ctx is None or parameter is None:
        return ""
    named = parameter.name == "model" and _table_of(ctx) is not None
    here = named or ctx.get_parameter_source(str(parameter.name)) is ParameterSource.DEFAULT_MAP
    return str(found.where) if here else ""


def _settings(ctx: click.Context) -> dict[str, Setting]:
    """What the file says for the command of `ctx`."""
    config, at = ctx.find_object(Config), ctx
    path: tuple[str, ...] = ()
    while at.parent is not None:
        path, at = (str(at.info_name), *path), at.parent
    return {} if config is None else config.settings(path, ctx.command, _table_of(ctx))


def _table_of(ctx: click.Context) -> str | None:
    """The NAME of the ``[models.NAME]`` that is used."""
    config, name = ctx.find_object(Config), ctx.meta.get(_meta(ctx))
    return name if config is not None and name in config.models else None


def _meta(ctx: click.Context) -> str:
    """The key under which the model of the command of `ctx`, as it was called, is kept in `ctx.meta`."""
    return f"inferflow.cli.config.model {ctx.command_path}"
