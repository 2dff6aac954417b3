"""Parts: from the tables of a spec to what can be called in a flow.

A part is a table with a ``block`` (a primitive that owns weights, or a block of the library), or a stack (``count`` and
``flow``). `resolve_part` settles ``choose`` and ``with``, lays norms over ``[norm]``, and checks the keys: one that the block
does not know is an error where it was written, and is dropped where it was only inherited. Keys borrowed by ``with`` are
evaluated where the borrowed table was written, the part's own where the part was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import SpecError, did_you_mean
from ..spec.document import Leaf, Node, Table, Where
from ..spec.expression import Scope, show
from ..spec.library import Spec, merge
from ..spec.signature import Signature, parse_signature
from .primitives import PRIMITIVES
from .scope import TableValue, literal, resolve_node

__all__ = ["RESERVED", "Part", "choose_layer", "is_norm", "part_tables", "resolve_part"]

RESERVED = ("model", "let", "norm", "tensors", "match", "gguf", "block", "extends")
PART_KEYS = ("block", "with", "if", "prefix", "suffix", "choose")
STACK_KEYS = ("count", "flow", "choose", "args")
_NORM = re.compile(r"norm(_?\d+)?$")


@dataclass(frozen=True)
class Part:
    """A part ready to be called: `given` are its parameters as written, `signature` the closed set of them."""

    name: str
    block: str
    table: Table
    given: Mapping[str, Node]
    signature: Signature
    where: Where
    scope: Scope
    borrowed: Mapping[str, Scope]  # the keys that ``with`` brought, and where they were written

    def scope_of(self, key: str) -> Scope:
        """Where what is given for `key` is evaluated."""
        return self.borrowed.get(key, self.scope)


def is_norm(name: str) -> bool:
    return _NORM.search(name) is not None


def part_tables(table: Table) -> dict[str, Table]:
    """The sub-tables of a stack, a block's ``parts`` or the whole document that may be called."""
    return {name: node for name, node in table.items() if isinstance(node, Table) and name not in RESERVED}


def choose(table: Table, scope: Scope) -> tuple[Table, Table | None]:
    """(`table` with its chosen alternative laid over it, the alternative)."""
    node = table.get("choose")
    if node is None:
        return table, None
    word = resolve_node(node, scope)
    options = [name for name, sub in table.items() if isinstance(sub, Table)]
    if word not in options:
        fix = did_you_mean(str(word), options) or f"its tables are {', '.join(options) or 'none'}"
        raise SpecError(f"choose gives {show(word)}, which is no table here", where=str(node.where), fix=fix)
    chosen = table.table(word)
    rest = Table({k: v for k, v in table.items() if k not in ("choose", word)}, table.where)
    return merge(rest, chosen), chosen


def resolve_part(name: str, table: Table, scope: Scope, spec: Spec) -> Part:
    """`table` as a Part; SpecError for an unknown block or key."""
    full, chosen = choose(table, scope)
    borrowed: dict[str, Node] = {}
    lender: Scope = scope
    if "with" in full:
        value = resolve_node(full["with"], scope)
        if isinstance(value, TableValue):
            borrowed, lender = dict(value.table), value.scope
    if is_norm(name):
        base = spec.tree.table("norm")
        full = merge(Table({**base, **borrowed}, full.where), full)
    else:
        full = merge(Table(borrowed, full.where), full)
    block_node = full.get("block")
    block = literal(block_node, "block") or ("norm" if is_norm(name) else None)
    if block is None:
        raise SpecError(f"'{name}' has no block", where=str(table.where), fix='write block = "linear", "attention", …')
    signature = signature_of(block, spec, block_node.where if block_node else full.where)
    given: dict[str, Node] = {}
    inherited = set(table) - set(chosen or table) if chosen is not None else set()
    alternatives = {k for k, v in table.items() if isinstance(v, Table)} if chosen is not None else set()
    for key, node in full.items():
        if key in PART_KEYS:
            continue
        if key in signature:
            given[key] = node
        elif not (key in inherited or key in alternatives or _inherited(node, block_node, spec)):
            fix = did_you_mean(key, signature) or f"it has {', '.join(signature) or 'no parameters'}"
            raise SpecError(f"'{name}' ({block}) has no parameter '{key}'", where=str(node.where), fix=fix)
    scopes = {key: lender for key, node in given.items() if borrowed.get(key) is node}
    return Part(name, block, full, given, signature, table.where, scope, scopes)


def choose_layer(name: str, table: Table, scope: Scope) -> Table:
    """One layer of a stack: `table` with its alternative for that layer; SpecError for a key that stacks do not have."""
    inner, chosen = choose(table, scope)
    if chosen is not None and "count" in chosen:
        reason = f"'count' stands in the stack '{name}' itself"
        raise SpecError(reason, where=str(chosen["count"].where), fix=f"an alternative has {', '.join(STACK_KEYS[1:])}")
    for key, node in inner.items():
        if isinstance(node, Leaf) and key not in STACK_KEYS:
            fix = did_you_mean(key, STACK_KEYS) or f"a stack has {', '.join(STACK_KEYS)} and tables"
            raise SpecError(f"stack '{name}' has no key '{key}'", where=str(node.where), fix=fix)
    return inner


def _inherited(node: Node, block: Node | None, spec: Spec) -> bool:
    """True when `node` was written in a file that the one which chose the block extends."""
    if block is None or node.where.file == block.where.file:
        return False
    order = {file: n for n, file in enumerate(spec.files)}
    return order.get(node.where.file, 0) > order.get(block.where.file, len(order))


def signature_of(block: str, spec: Spec, where: Where) -> Signature:
    """The parameters of a primitive or library block called `block`."""
    primitive = PRIMITIVES.get(block)
    if primitive is not None and primitive.owns_weights:
        return primitive.signature
    table = spec.blocks.get(block)
    if not isinstance(table, Table):
        known = [*spec.blocks, *(p.name for p in PRIMITIVES.values() if p.owns_weights)]
        fix = did_you_mean(block, known) or f"blocks are {', '.join(known)}"
        raise SpecError(f"there is no block '{block}'", where=str(where), fix=fix)
    for key, node in table.items():
        if key not in ("params", "parts", "flow", "args"):
            fix = did_you_mean(key, ("params", "parts", "flow", "args")) or "a block has params, parts, args and flow"
            raise SpecError(f"block '{block}' has an unknown key '{key}'", where=str(node.where), fix=fix)
    return parse_signature(table.table("params"))


def word_list(node: Node | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """``args``: a list of plain names."""
    if node is None:
        return default
    items = node.value if isinstance(node, Leaf) else None
    if not isinstance(items, list) or not items:
        raise SpecError("'args' is a list of names", where=str(node.where), fix='write args = ["x", "memory"]')
    return tuple(literal(item, "args") or "" for item in items)
