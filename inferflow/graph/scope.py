"""Scopes: what a name means while a graph is built.

A block sees its parameters, then the names assigned in its flow, then the model's: `[let]`, ``cfg`` and the layer ``i``.
Values are computed when first asked for; a `[let]` that mentions ``i`` (directly or not) is computed once a layer.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..errors import SpecError
from ..spec.document import Leaf, Node, Table, Where
from ..spec.expression import Evaluator, Scope, parse_expression
from ..spec.signature import Parameter, Signature, check_type
from .absent import absent_keys

__all__ = ["BlockScope", "ModelScope", "TableValue", "resolve_node", "settled"]

MAX_CHAIN = 100
MAX_WORK = 2_000_000  # of one spec: some seconds; the largest models take a fifth


class TableValue(Mapping[str, Any]):
    """A table given as a parameter: its keys are evaluated, where they were written, when asked for."""

    def __init__(self, table: Table, scope: Scope) -> None:
        self.table = table
        self.scope = scope

    def __getitem__(self, key: str) -> Any:
        return resolve_node(self.table[key], self.scope)

    def __iter__(self) -> Any:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def __bool__(self) -> bool:
        return True  # an empty table says "yes, with the defaults"

    def present(self) -> TableValue | None:
        """The table without its ``if``, or None when that is false."""
        if "if" not in self.table:
            return self
        rest = Table({key: node for key, node in self.table.items() if key != "if"}, self.table.where)
        return TableValue(rest, self.scope) if resolve_node(self.table["if"], self.scope) else None


def settled(value: Any) -> Any:
    """`value` as plain data: the tables in it, given or named in `[let]`, are evaluated now, so that nothing is later."""
    if isinstance(value, TableValue):
        there = value.present()
        return None if there is None else {key: settled(there[key]) for key in there}
    return [settled(item) for item in value] if isinstance(value, list) else value


def resolve_node(node: Node, scope: Scope, parameter: Parameter | None = None) -> Any:
    """The value of a TOML node in `scope`: strings are expressions, unless they are one of the parameter's words."""
    scope.touch(node.where)
    if isinstance(node, Table):
        return TableValue(node, scope)
    value = node.value
    if isinstance(value, str):
        if parameter is not None and value in parameter.choices:
            return value
        if parameter is not None and parameter.choices and value.isidentifier() and not _known(scope, value):
            return check_type(parameter, value, node.where)  # a word of its own that is none of the parameter's
        return Evaluator(scope, node.where, value).visit(parse_expression(value, node.where))
    if isinstance(value, list):
        return [resolve_node(item, scope) for item in value]
    return value


def _known(scope: Scope, name: str) -> bool:
    return name in scope.names() or name in ("True", "False", "None")


class ModelScope(Scope):
    """``cfg``, ``i`` and ``[let]``. One object a layer, made by `at`; what does not mention ``i`` is shared by all."""

    def __init__(self, let: Table, config: Mapping[str, Any], tensors: Collection[str]) -> None:
        self.let = let
        self.config = config
        self.tensors = tensors
        self.layer: int | None = None
        self.shared: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self.pending: list[str] = []
        self.used_layer = False
        self.read: set[Where] = set()
        self.work = [0]

    def at(self, layer: int | None) -> ModelScope:
        scope = ModelScope(self.let, self.config, self.tensors)
        scope.layer, scope.shared, scope.read, scope.work = layer, self.shared, self.read, self.work
        return scope

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def touch(self, where: Where) -> None:
        self.read.add(where)

    def spend(self, work: int, where: Where) -> None:
        self.work[0] += work
        if self.work[0] > MAX_WORK:
            fix = "use fewer layers, shorter lists and shorter expressions"
            raise SpecError(
                "the spec takes too much work for this config", where=str(where) if where.line else "", fix=fix
            )

    def names(self) -> Sequence[str]:
        return ["cfg", "i", *self.let]

    def written(self, name: str) -> tuple[Node, Scope] | None:
        """Where a name gets its value from."""
        return (self.let[name], self) if name in self.let else None

    def lookup(self, name: str) -> Any:
        if name == "cfg":
            return self.config
        if name == "i" and self.layer is not None:
            self.used_layer = True
            return self.layer
        if name in self.own:
            self.used_layer = True
            return self.own[name]
        if name in self.shared:
            return self.shared[name]
        if name not in self.let:
            raise KeyError(name)
        return self._define(name)

    def _define(self, name: str) -> Any:
        node = self.let[name]
        if name in self.pending:
            circle = " -> ".join([*self.pending, name])
            raise SpecError(f"[let] {circle} is a circle", where=str(node.where), fix="break it")
        if len(self.pending) > MAX_CHAIN:
            raise SpecError(
                f"[let] names lean on one another over {MAX_CHAIN} steps", where=str(node.where), fix="fewer"
            )
        self.pending.append(name)
        outer, self.used_layer = self.used_layer, False
        try:
            value = resolve_node(node, self)
        finally:
            self.pending.pop()
        (self.own if self.used_layer else self.shared)[name] = value
        self.used_layer = self.used_layer or outer
        return value


class BlockScope(Scope):
    """The inside of one block: `given` are the keys written at its use, the rest are defaults.

    `outer` says for each of the given where it is evaluated.
    """

    def __init__(
        self,
        signature: Signature,
        given: Mapping[str, Node],
        outer: Callable[[str], Scope],
        model: ModelScope,
        where: Where,
    ) -> None:
        self.signature = signature
        self.given = given
        self.outer = outer
        self.model = model
        self.where = where
        self.cache: dict[str, Any] = {}

    def names(self) -> Sequence[str]:
        return [*self.signature, *self.model.names()]

    def has(self, tensor: str) -> bool:
        return self.model.has(tensor)

    def touch(self, where: Where) -> None:
        self.model.touch(where)

    def spend(self, work: int, where: Where) -> None:
        self.model.spend(work, where)

    def written(self, name: str) -> tuple[Node, Scope] | None:
        """Where a name gets its value from."""
        if name in self.given:
            return self.given[name], self.outer(name)
        if name in self.signature:
            return Leaf(self.signature[name].default_text, self.signature[name].where), self
        return self.model.written(name)

    def lookup(self, name: str) -> Any:
        if name in self.cache:
            return self.cache[name]
        parameter = self.signature.get(name)
        if parameter is None:
            return self.model.lookup(name)
        self.cache[name] = value = self._evaluate(parameter)
        return value

    def _evaluate(self, parameter: Parameter) -> Any:
        node = self.given.get(parameter.name)
        if node is not None:
            outer = self.outer(parameter.name)
            value = resolve_node(node, outer, parameter)
            if isinstance(value, TableValue):
                value = value.present()
            if parameter.type == "table" and (value is False or value is None):
                return None
            if parameter.type == "table" and value is True:
                return TableValue(Table({}, node.where), outer)
            if value is None and parameter.default is None:
                reason, fix = absent_keys(node, outer, self.model.config, parameter.type)
                if reason:
                    fix = fix or "give it a value, or a fallback with 'or'"
                    raise SpecError(f"'{parameter.name}' is missing: {reason}", where=str(node.where), fix=fix)
            if value is not None or parameter.default is None:
                return check_type(parameter, value, node.where)
        if parameter.default is None:
            fix = f"give {parameter.name} = …"
            raise SpecError(f"'{parameter.name}' is missing", where=str(self.where), fix=fix)
        self.cache[parameter.name] = None  # a default that asks for itself sees nothing
        value = Evaluator(self, parameter.where, parameter.default_text).visit(parameter.default)
        if parameter.type == "table" and value is True:
            return TableValue(Table({}, parameter.where), self)
        return check_type(parameter, value, parameter.where)


def literal(node: Node | None, what: str) -> str | None:
    """A key that is a plain word (``block``, ``prefix``), never an expression."""
    if node is None:
        return None
    if not isinstance(node, Leaf) or not isinstance(node.value, str):
        raise SpecError(f"'{what}' is a word", where=str(node.where), fix=f'write {what} = "name"')
    return node.value


def axis_factors(node: ast.expr, evaluate: Callable[[ast.expr], Any]) -> list[tuple[str, int]]:
    """The factors of a size written as a product of names, ``heads*head_dim`` -> [("heads", 9), ("head_dim", 64)]."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*axis_factors(node.left, evaluate), *axis_factors(node.right, evaluate)]
    return [(ast.unparse(node), evaluate(node))]
