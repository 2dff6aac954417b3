"""A starting file for a new model: it extends a shipped spec, and shows all that it inherits as comments."""

from __future__ import annotations

from collections.abc import Iterator

from .document import Leaf, Node, Table
from .library import load_spec

__all__ = ["starting_spec"]

_HEAD = """\
# A spec for a new model, starting from '{base}'. Say only what differs; everything in comments is inherited as it stands.
# The language: model_specs/README.md. Check it: inferflow spec check THIS.toml -m MODEL
extends = "{base}"

[match]
model_type = ["{model_type}"]"""

_PART_KEYS = ("block", "with", "if", "prefix", "suffix", "choose")


def starting_spec(base: str, model_type: str | None = None) -> str:
    """The text of a spec that extends `base`. Raises SpecError for an unknown base."""
    spec = load_spec(base)
    lines = [
        _HEAD.format(base=base, model_type=_clean(model_type or "my_model")),
        *_match(spec.tree.table("match")),
        "",
    ]
    for key, node in spec.tree.items():
        if key not in ("match", "gguf") and isinstance(node, Table):
            lines.extend(_table((key,), _taken(node, spec.blocks)))
    return "\n".join(lines).rstrip() + "\n"


def _match(match: Table) -> Iterator[str]:
    """What of [match] is inherited."""
    prefix = match.get("prefix", Leaf([Leaf("")]))
    yield f"# prefix = {_value(prefix)}  # what may stand before the names of all tensors"
    if "root" in match:
        yield f"# root = {_value(match['root'])}  # the table of the config that describes the text model"


def _taken(table: Table, blocks: Table, outer: str | None = None) -> Table:
    """`table` and its parts without the inherited keys that a part's block does not take. An alternative of a ``choose``
    has the block of the part, `outer`, unless it says another."""
    block = _block(table) or outer
    options = {key for key, node in table.items() if isinstance(node, Table)} if "choose" in table else set()
    kinds = {block} | {_block(table.table(key)) or block for key in options}
    known = {*_PART_KEYS, *options}
    for kind in kinds:
        body = blocks.get(kind) if kind is not None else None
        if not isinstance(body, Table):  # a stack, a parameter's table, or a primitive: all its keys are its own
            known |= set(table)
        else:
            known |= set(body.table("params"))
    return Table(
        {
            key: _taken(node, blocks, block if key in options else None) if isinstance(node, Table) else node
            for key, node in table.items()
            if key in known
        },
        table.where,
    )


def _block(table: Table) -> str | None:
    node = table.get("block")
    return node.value if isinstance(node, Leaf) and isinstance(node.value, str) else None


def _clean(word: str) -> str:
    return "".join(c for c in word if c.isalnum() or c in "_-.")[:80]


def _table(path: tuple[str, ...], table: Table) -> Iterator[str]:
    own = {k: v for k, v in table.items() if not isinstance(v, Table) or _inline(v)}
    if own or not table:
        yield f"# [{'.'.join(path)}]"
        width = max((len(_key(k)) for k in own), default=0)
        for key, node in own.items():
            yield f"# {_key(key):<{width}} = {_value(node)}"
        yield ""
    for key, node in table.items():
        if isinstance(node, Table) and not _inline(node):
            yield from _table((*path, _key(key)), node)


def _inline(table: Table) -> bool:
    return "from" in table


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else f'"{key}"'


def _value(node: Node) -> str:
    if isinstance(node, Table):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in node.items()) + " }"
    assert isinstance(node, Leaf)
    if isinstance(node.value, list):
        return "[" + ", ".join(_value(item) for item in node.value) + "]"
    if isinstance(node.value, bool):
        return str(node.value).lower()
    return (
        '"' + node.value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        if isinstance(node.value, str)
        else str(node.value)
    )
