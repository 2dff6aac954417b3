"""Which parameter asks for a weight, read off the text of a spec: for messages. Nothing is evaluated.

A block's part is there by its own ``if`` or by the conditions of the block's flow; the parameters named in them are its
`guards`. Its bias is there by the parameters of ``bias = "q_bias"`` and of that one's default.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..errors import SpecError
from ..graph.parts import is_norm, part_tables
from ..graph.primitives import PRIMITIVES
from ..spec.document import Leaf, Node, Table, Where
from ..spec.expression import parse_expression
from ..spec.flow import parse_flow
from ..spec.library import Spec, merge

__all__ = ["Asked", "asked_by_role", "written"]

MAX_ROLES = 2000  # of one block: blocks of blocks could have any number


@dataclass(frozen=True)
class Asked:
    """A part that owns weights. `part` is the user's part it belongs to, `block` that one's block and `table` its keys;
    `guards`, `bias` and `inside` (the table parameter a norm borrows from) are parameters of it, the nearest first."""

    role: str
    primitive: str
    guards: tuple[str, ...] = ()
    bias: tuple[str, ...] = ()
    inside: str = ""
    part: str = ""
    block: str = ""
    table: Table = field(default_factory=lambda: Table({}))

    @property
    def owner(self) -> str:
        return f"'{self.part}' ({self.block})"


def asked_by_role(spec: Spec) -> dict[tuple[str, str], list[Asked]]:
    """All parts by (stack, role): one for each alternative of a ``choose``."""
    out: dict[tuple[str, str], list[Asked]] = {}
    blocks = _Blocks(spec)
    stacks = [("", spec.tree), *((n, t) for n, t in part_tables(spec.tree).items() if "count" in t)]
    for stack, table in stacks:
        for inner in _alternatives(table, of_stack=True):
            for name, part in part_tables(inner).items():
                for variant in _alternatives(part):
                    for found in _part(name, variant, blocks, spec):
                        known = out.setdefault((stack, found.role), [])
                        if found not in known:
                            known.append(found)
    return out


def written(asked: Asked, names: tuple[str, ...], spec: Spec) -> tuple[str, Node] | None:
    """The first of the parameters `names` that the user's part (or ``[norm]``) gives, and what it gives."""
    tables = [asked.table]
    if asked.primitive == "norm" and names == ("bias",):
        inner = asked.table.get(asked.inside) if asked.inside else None
        tables = [inner] if isinstance(inner, Table) else [] if asked.inside else tables
        tables.append(spec.tree.table("norm"))
    return next(((name, table[name]) for name in names for table in tables if name in table), None)


def _alternatives(table: Table, of_stack: bool = False) -> list[Table]:
    if "choose" not in table:
        return [table]
    options = {
        name: sub
        for name, sub in table.items()
        if isinstance(sub, Table) and not (of_stack and ("block" in sub or is_norm(name)))
    }
    rest = Table({key: node for key, node in table.items() if key != "choose" and key not in options}, table.where)
    return [merge(rest, sub) for sub in options.values()] or [table]


def _part(name: str, table: Table, blocks: _Blocks, spec: Spec) -> Iterator[Asked]:
    block = _text(table.get("block")) or ("norm" if is_norm(name) else "")
    if block in PRIMITIVES:
        bias = ("bias",) if "bias" in PRIMITIVES[block].signature else ()
        yield Asked(name, block, (), bias, "", name, block, table)
        return
    prefix, suffix = _text(table.get("prefix")), _text(table.get("suffix"))
    for role in blocks.roles(block):
        yield replace(role, role=f"{prefix}{role.role}{suffix}", part=name, block=block, table=table)


class _Blocks:
    """The roles of every block, in terms of the block's own parameters."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.known: dict[str, list[Asked]] = {}

    def roles(self, block: str) -> list[Asked]:
        if block not in self.known:
            self.known[block] = []  # a block that calls itself has no more
            table = self.spec.blocks.get(block)
            found = self.inside(table) if isinstance(table, Table) else iter(())
            self.known[block] = [role for _, role in zip(range(MAX_ROLES), found, strict=False)]
        return self.known[block]

    def inside(self, block: Table) -> Iterator[Asked]:
        params = block.table("params")
        conditions = _conditions(block.get("flow"))
        for name, part in part_tables(block.table("parts")).items():
            asked = _names(part["if"]) if "if" in part else sorted(conditions.get(name, ()))
            guards = tuple(n for n in asked if n in params)
            kind = _text(part.get("block")) or ("norm" if is_norm(name) else "")
            if kind in PRIMITIVES:
                inside = _text(part.get("with"))
                bias = ("bias",) if inside in params and kind == "norm" else _chain(part.get("bias"), params)
                yield Asked(name, kind, tuple(dict.fromkeys(guards)), bias, inside if inside in params else "")
                continue
            prefix, suffix = _text(part.get("prefix")), _text(part.get("suffix"))
            for role in self.roles(kind):
                outer = [n for g in role.guards for n in _chain(part.get(g), params)[:1]]
                inside = "".join(_chain(part.get(role.inside), params)[:1]) if role.inside else ""
                bias = tuple(n for b in role.bias[:1] for n in _chain(part.get(b), params))
                bias = (role.bias if inside else ()) if role.inside else bias  # a key of the borrowed table
                made = replace(role, role=f"{prefix}{role.role}{suffix}", bias=bias, inside=inside)
                yield replace(made, guards=tuple(dict.fromkeys((*guards, *outer))))


def _text(node: Node | None) -> str:
    return node.value if isinstance(node, Leaf) and isinstance(node.value, str) else ""


def _names(node: Node | None) -> list[str]:
    """The names in an expression."""
    try:
        tree = parse_expression(_text(node) or "None", Where())
    except SpecError:
        return []
    return [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]


def _chain(node: Node | None, params: Mapping[str, Node]) -> tuple[str, ...]:
    """The parameter that `node` names, then the one its default names, and so on: ``("q_bias", "bias")``."""
    out: list[str] = []
    name = _text(node).strip()
    while name in params and name not in out:
        out.append(name)
        name = _text(params[name]).partition("=")[2].strip()
    return tuple(out)


def _conditions(flow: Node | None) -> dict[str, set[str]]:
    """For every name in a flow, the names in the conditions it stands under; none when it also stands without."""
    try:
        lines = parse_flow(flow) if flow is not None else ()
    except SpecError:
        return {}
    return _either([_under(line.value) for line in lines])


def _under(node: ast.AST) -> dict[str, set[str]]:
    if isinstance(node, ast.Name):
        return {node.id: set()}
    if not isinstance(node, ast.IfExp):
        return _either([_under(child) for child in ast.iter_child_nodes(node)])
    test, one, two = _under(node.test), _under(node.body), _under(node.orelse)
    for branch, other in ((one, two), (two, one)):
        for name in branch.keys() - other.keys():
            branch[name] |= test.keys()
    return _either([test, one, two])


def _either(parts: list[dict[str, set[str]]]) -> dict[str, set[str]]:
    """Where a name is in several, one without a condition is enough."""
    out: dict[str, set[str]] = {}
    for part in parts:
        for name, tests in part.items():
            known = out.get(name, tests)
            out[name] = tests | known if tests and known else set()
    return out
