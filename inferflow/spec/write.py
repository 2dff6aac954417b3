"""A spec as one TOML file that stands by itself: nothing extended, its blocks with it, and free of the checkpoint's names.

It serves a checkpoint whose tensors are named by the graph's own keys (a quantised directory). So the tables of names are left
out, and each ``has('name')`` is replaced by what it said of the checkpoint that the spec was used with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..errors import UnsupportedError
from .library import Spec, plain

__all__ = ["spec_text"]

_HAS = re.compile(r"""has\(\s*(?:'([^'"\\]*)'|"([^'"\\]*)")\s*\)""")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_NAMES = (
    "tensors",
    "gguf",
    "extends",
    "block",
)  # sections that speak of another file's tensors, and what is written apart


def spec_text(spec: Spec, tensors: Collection[str]) -> str:
    """The text. `tensors` are the names in the checkpoint. UnsupportedError for a ``has`` of a name that is computed."""
    tree = {key: plain(node) for key, node in spec.tree.items() if key not in _NAMES}
    settled = _settle({**tree, "block": plain(spec.blocks)}, tensors)
    head = f"# '{spec.name}' as it was used ({' < '.join(_safe(file) for file in spec.files)}).\n"
    return head + "\n".join(_table((), settled)) + "\n"


def _safe(file: str) -> str:
    name = file.replace("\\", "/").rpartition("/")[2]
    return name if name.isprintable() else ascii(name)


def _settle(value: Any, tensors: Collection[str]) -> Any:
    """`value` with every ``has(…)`` answered."""
    if isinstance(value, Mapping):
        return {key: _settle(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_settle(item, tensors) for item in value]
    if not isinstance(value, str) or "has" not in value:
        return value
    text = _HAS.sub(lambda found: str((found[1] or found[2] or "") in tensors), value)
    if re.search(r"\bhas\s*\(", text):
        fix = "write the name out in has('name')"
        raise UnsupportedError(f"'{value}' asks for a tensor by a computed name", where="spec", fix=fix)
    return text


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table: its values, then the tables in it."""
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (not tables or len(tables) < len(table)):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in table.items():
        if key not in tables:
            yield f"{_key(key)} = {_value(value, '  ')}"
    for key, value in tables.items():
        yield from _table((*path, key), value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _value(value: Any, indent: str = "") -> str:
    """A value on one line; a list of texts, such as a flow, on one line each where `indent` is given."""
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        items = [_value(item) for item in value]
        if indent and len(items) > 1 and all(isinstance(item, str) for item in value):
            return "[\n" + "".join(f"{indent}{item},\n" for item in items) + "]"
        return f"[{', '.join(items)}]"
    return str(value)  # numbers, dates; Python writes inf and nan as TOML does


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
