"""Flows: wiring as a list of assignments, ``name[, name] = expr`` or ``name op= expr``.

A flow has the grammar of expressions plus keyword arguments and ``**table`` in calls; what its names and calls mean is
settled by `inferflow.graph.build`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ..errors import SpecError
from .document import Leaf, Node, Where
from .expression import _ALLOWED, parse_tree, read_tree

__all__ = ["Assignment", "parse_flow"]

_FLOW_ALLOWED = (*_ALLOWED, ast.Module, ast.Assign, ast.AugAssign, ast.Store)
MAX_LINES = 200


@dataclass(frozen=True)
class Assignment:
    """``targets = value``; `text` and `where` are the line it came from."""

    targets: tuple[str, ...]
    value: ast.expr
    text: str
    where: Where


def parse_flow(node: Node) -> tuple[Assignment, ...]:
    """The assignments of a ``flow`` key; SpecError if it is anything but a list of them."""
    items = node.value if isinstance(node, Leaf) else None
    if not isinstance(items, list) or not items or len(items) > MAX_LINES:
        fix = 'write flow = ["x += attn(attn_norm(x))", …]'
        raise SpecError("a flow is a list of 1 to 200 assignments", where=str(node.where), fix=fix)
    return tuple(_parse_line(item) for item in items)


def _parse_line(item: Node) -> Assignment:
    if not isinstance(item, Leaf) or not isinstance(item.value, str):
        raise SpecError("a line of a flow is a string", where=str(item.where), fix='write "x = f(x)"')
    text, where = item.value, item.where
    tree = read_tree(text, "exec", where)
    assert isinstance(tree, ast.Module)
    if len(tree.body) != 1:
        raise SpecError(f"'{text[:80]}' is not one assignment", where=str(where), fix="one assignment per string")
    statement = tree.body[0]
    if isinstance(statement, ast.Assign | ast.AugAssign):
        parse_tree(text, "exec", where, _FLOW_ALLOWED)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        load = ast.copy_location(ast.Name(statement.target.id, ast.Load()), statement.target)
        value = ast.copy_location(ast.BinOp(load, statement.op, statement.value), statement)
        return Assignment((statement.target.id,), value, text, where)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if all(isinstance(n, ast.Name) for n in names):
            return Assignment(tuple(n.id for n in names if isinstance(n, ast.Name)), statement.value, text, where)
    raise SpecError(
        f"'{text[:80]}' is not an assignment", where=str(where), fix="write 'x = f(x)', 'a, b = f(x)' or 'x += f(x)'"
    )
