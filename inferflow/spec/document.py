"""TOML with positions: a parsed document in which every table and value knows its file, line and column.

`tomllib` decides what is valid and what it means; a small scanner then walks the same text to find where each key's value
starts, so that an error inside an expression can point at the character.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same parser under its older name
    import tomli as tomllib

__all__ = ["Leaf", "Node", "Table", "Where", "make_table", "parse_toml"]

MAX_BYTES = 1 << 20
MAX_DOTS = 200  # in a line: the parser takes quadratic time and memory for dotted keys
MAX_INT = 1 << 63
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Where:
    """A place in a spec. Line and column count from 1; `file` is as the user named it."""

    file: str = "<memory>"
    line: int = 0
    column: int = 0
    quote: int = field(default=1, compare=False)  # how many characters open the string that stands there

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    def shift(self, columns: int) -> Where:
        return Where(self.file, self.line, self.column + columns)


@dataclass(frozen=True)
class Leaf:
    """A scalar, or a list of nodes."""

    value: Any
    where: Where = field(default_factory=Where, compare=False)


@dataclass(frozen=True)
class Table(Mapping[str, "Node"]):
    """A TOML table. Immutable; `where` is its header or opening brace."""

    entries: dict[str, Node]
    where: Where = field(default_factory=Where, compare=False)

    def __getitem__(self, key: str) -> Node:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def table(self, key: str) -> Table:
        """The sub-table `key`, empty when absent; a SpecError when it is something else."""
        node = self.entries.get(key)
        if node is None:
            return Table({}, self.where)
        if not isinstance(node, Table):
            raise SpecError(f"'{key}' must be a table", where=str(node.where), fix=f"write [{key}] or {key} = {{ … }}")
        return node


Node = Leaf | Table


def make_table(data: Mapping[str, Any], where: Where | None = None) -> Table:
    """Plain Python data as a Table, all at one place (used for overrides and by tests)."""
    return _build(dict(data), (), {}, where or Where())  # type: ignore[return-value]


def parse_toml(text: str, file: str) -> Table:
    """Parse `text`; SpecError (with line and column) if it is not TOML or is too large."""
    text = text.removeprefix("\ufeff")  # a byte order mark, as some editors write
    if len(text) > MAX_BYTES:
        raise SpecError(f"the file has {len(text)} characters", where=file, fix=f"it may have {MAX_BYTES} at most")
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DOTS:
            fix = "break the line, or flatten the tables"
            raise SpecError(f"a line with more than {MAX_DOTS} dots", where=f"{file}:{number}:1", fix=fix)
    try:
        data = tomllib.loads(text)
        places = _Scanner(text, file).scan()
        return _build(data, (), places, Where(file, 1, 1))  # type: ignore[return-value]
    except tomllib.TOMLDecodeError as error:
        reason, place = _position(str(error), text, file)
        raise SpecError(f"not valid TOML: {reason}", where=str(place), fix="see https://toml.io") from None
    except ValueError as error:  # Python refuses to read a number of thousands of digits
        raise SpecError(f"not valid TOML: {str(error)[:100]}", where=file, fix="write smaller numbers") from None
    except RecursionError:
        raise SpecError("nested too deeply", where=file, fix="flatten the tables") from None


def _position(message: str, text: str, file: str) -> tuple[str, Where]:
    """The parser's message and the place it names in its last words."""
    reason, _, tail = message.rpartition(" (at ")
    if reason.endswith("character '\\n'"):  # the parser says so in strings only
        reason = "a string is not closed on this line"
    if reason.startswith('Expected "\'"') and "'" in text:  # nor on any after it: it starts at the last there is
        before = text[: text.rindex("'")]
        start = Where(file, before.count("\n") + 1, len(before) - before.rfind("\n"))
        return "a string is not closed", start
    place = re.match(r"line (\d+), column (\d+)", tail)
    if place is not None:
        return reason, Where(file, int(place[1]), int(place[2]))
    lines = text.split("\n")
    return reason or message, Where(file, len(lines), len(lines[-1]) + 1)


def _build(data: Any, path: Path, places: dict[Path, Where], outer: Where) -> Node:
    where = places.get(path, outer)
    if isinstance(data, dict):
        return Table({k: _build(v, (*path, k), places, where) for k, v in data.items()}, where)
    if isinstance(data, list):
        return Leaf([_build(v, (*path, n), places, where) for n, v in enumerate(data)], where)
    if not isinstance(data, str | int | float | bool) and data is not None:
        raise SpecError(f"a {type(data).__name__} is not used here", where=str(where), fix="write a string")
    if isinstance(data, int) and abs(data) > MAX_INT:
        raise SpecError("the integer does not fit in 64 bits", where=str(where), fix="write it as a float")
    return Leaf(data, where)


class _Scanner:
    """Finds the start of every value in TOML that is known to be valid."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.at = 0
        self.places: dict[Path, Where] = {}
        self.starts = [0]
        self.starts.extend(n + 1 for n, c in enumerate(text) if c == "\n")

    def scan(self) -> dict[Path, Where]:
        table: Path = ()
        while self._blank(newlines=True):
            if self.text[self.at] == "[":
                start = self.at
                if self.text.startswith("[[", start):
                    raise SpecError("arrays of tables are not used here", where=str(self._where()), fix="use [name]")
                self.at += 1
                table = self._key()
                self.at = self.text.index("]", self.at) + 1
                for n in range(1, len(table)):
                    self.places.setdefault(table[:n], self._where(start))
                self.places[table] = self._where(start)
            else:
                self._pair(table)
        return self.places

    def _where(self, at: int | None = None) -> Where:
        import bisect

        offset = self.at if at is None else at
        line = bisect.bisect_right(self.starts, offset)
        return Where(self.file, line, offset - self.starts[line - 1] + 1)

    def _blank(self, newlines: bool) -> bool:
        """Skip white space and comments; False at the end."""
        skip = " \t\r\n" if newlines else " \t"
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "#" and newlines:
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char in skip:
                self.at += 1
            else:
                return True
        return False

    def _key(self) -> Path:
        parts: list[str] = []
        while True:
            self._blank(newlines=False)
            char = self.text[self.at]
            start = self.at
            if char in "\"'":
                self._string()
                parts.append(next(iter(tomllib.loads(self.text[start : self.at] + "=0"))))
            else:
                while self.at < len(self.text) and (self.text[self.at].isalnum() or self.text[self.at] in "_-"):
                    self.at += 1
                parts.append(self.text[start : self.at])
            self._blank(newlines=False)
            if self.text[self.at] != ".":
                return tuple(parts)
            self.at += 1

    def _pair(self, table: Path) -> None:
        key = self._key()
        for n in range(1, len(key)):
            self.places.setdefault(table + key[:n], self._where())
        self._blank(newlines=False)
        self.at += 1  # the equals sign
        self._blank(newlines=False)
        self._value(table + key)

    def _value(self, path: Path) -> None:
        self.places[path] = self._where()
        char = self.text[self.at]
        if self.text.startswith(char * 3, self.at):
            self.places[path] = replace(self.places[path], quote=3)
        if char in "\"'":
            self._string()
        elif char in "[{":
            close = "]" if char == "[" else "}"
            self.at += 1
            n = 0
            while self._blank(newlines=True) and self.text[self.at] != close:
                if self.text[self.at] == ",":
                    self.at += 1
                elif char == "[":
                    self._value((*path, n))
                    n += 1
                else:
                    self._pair(path)
            self.at += 1
        else:
            while self.at < len(self.text) and self.text[self.at] not in ",]}#\n":
                self.at += 1

    def _string(self) -> None:
        quote = self.text[self.at]
        triple = self.text.startswith(quote * 3, self.at)
        end = quote * 3 if triple else quote
        self.at += len(end)
        while not self.text.startswith(end, self.at):
            self.at += 2 if quote == '"' and self.text[self.at] == "\\" else 1
        self.at += len(end)
        while triple and self.at < len(self.text) and self.text[self.at] == quote:
            self.at += 1  # up to two quotes may precede the closing three
