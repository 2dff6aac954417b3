"""The skeleton of a spec: which tables there are and which keys they have. Nothing is evaluated.

What a part or a stack may hold is settled when it is called; here are the tables that are read as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ..errors import SpecError, did_you_mean
from ..spec.document import Leaf, Node, Table
from ..spec.library import Spec
from .parts import RESERVED, is_norm

__all__ = ["structure_problems"]

# For each table, its keys: "word", "words" (one or a list), "table", or "any".
KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "model": {"kind": "word", "flow": "any"},
        "match": {"model_type": "words", "when": "word", "prefix": "words", "root": "word"},
        "gguf": {"arch": "words", "when": "word", "set": "table", "tensors": "table", "ignore": "list"},
    }
)
WANTED = MappingProxyType(
    {
        "word": "a string",
        "words": "a string or a list of strings",
        "table": "a table",
        "list": 'a list of strings: ignore = ["vision.*"]',
    }
)


def structure_problems(spec: Spec) -> Iterator[SpecError]:
    """Every unknown key and every table of the wrong kind, in the order of the document."""
    for name in RESERVED:
        node = spec.tree.get(name)
        if node is not None and not isinstance(node, Table):
            yield SpecError(f"'{name}' must be a table", where=str(node.where), fix=f"write [{name}]")
            return
    for name, known in KEYS.items():
        for key, node in spec.tree.table(name).items():
            if key not in known:
                fix = did_you_mean(key, known) or f"[{name}] has {', '.join(known)}"
                yield SpecError(f"[{name}] has no key '{key}'", where=str(node.where), fix=fix)
            else:
                yield from _kind(key, node, known[key])
    ignore = spec.tree.table("tensors").get("ignore")
    if ignore is not None:
        yield from _kind("ignore", ignore, "list")
    for name, node in spec.tree.items():
        if not isinstance(node, Table):
            yield SpecError(f"'{name}' is a value outside any table", where=str(node.where), fix="put it under [let]")
        elif name not in RESERVED:
            close = did_you_mean(name, RESERVED)
            if close and not is_norm(name) and not {"count", "flow", "block", "choose"} & set(node):
                yield SpecError(f"[{name}] is neither a part nor a stack", where=str(node.where), fix=close)
    if "model" not in spec.tree:
        fix = 'write extends = "decoder" at the top, or a [model] with kind and flow'
        yield SpecError("there is no [model]", where=str(spec.tree.where), fix=fix)


def _kind(key: str, node: Node, kind: str) -> Iterator[SpecError]:
    items = node.value if isinstance(node, Leaf) and isinstance(node.value, list) else None
    if kind == "table" or kind == "any":
        good = kind == "any" or isinstance(node, Table)
    elif items is not None and kind != "word":
        for item in items:
            if not isinstance(item, Leaf) or not isinstance(item.value, str):
                yield SpecError(
                    f"an entry of '{key}' is a string", where=str(item.where), fix=f"'{key}' is {WANTED[kind]}"
                )
                return
        good = True
    else:
        good = kind != "list" and isinstance(node, Leaf) and isinstance(node.value, str)
    if not good:
        yield SpecError(f"'{key}' is {WANTED[kind]}", where=str(node.where), fix="see model_specs/README.md")
