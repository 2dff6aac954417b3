"""Expressions: a whitelisted subset of Python over numbers, strings, lists and None-safe tables.

A spec is untrusted input. Text is parsed by `ast`, checked node by node against a whitelist with bounds on length, depth and
size, and walked by `Evaluator`; nothing is ever compiled or called but the functions listed here. Integers stay within
64 bits and exponents are bounded, so no expression can take more than microseconds or bytes.
"""

from __future__ import annotations

import ast
import math
import operator
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from ..errors import SpecError, did_you_mean
from .document import MAX_INT, Where

__all__ = ["FUNCTIONS", "Evaluator", "Scope", "column_of", "evaluate", "parse_expression"]

MAX_CHARS = 2000
MAX_NODES = 400
MAX_DEPTH = 40
MAX_EXPONENT = 64
MAX_LENGTH = 65536

_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: operator.pow,
    }
)
_COMPARE: Mapping[type, Callable[[Any, Any], bool]] = MappingProxyType(
    {
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.Is: lambda a, b: a is b,
        ast.IsNot: lambda a, b: a is not b,
        ast.In: lambda a, b: b is not None and a in b,
        ast.NotIn: lambda a, b: b is None or a not in b,
    }
)
_ALLOWED: tuple[type, ...] = (
    ast.Expression, ast.Name, ast.Load, ast.Constant, ast.Attribute, ast.Subscript, ast.BinOp, ast.UnaryOp, ast.USub,
    ast.UAdd, ast.Not, ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.IfExp, ast.Call, ast.keyword, ast.List, ast.Tuple,
    *_OPERATORS, *_COMPARE,
)  # fmt: skip


def show(value: Any) -> str:
    """A value for a message, short however large it is."""
    if isinstance(value, int) and abs(value) > MAX_INT:
        return "an integer beyond 64 bits"  # whose repr() is slow, or an error
    return "a table" if isinstance(value, Mapping) else reprlib.repr(value)


def _short(value: list[Any]) -> bool:
    """Whether a list has at most `MAX_LENGTH` elements, those of its lists included (they may be shared)."""
    left, stack = MAX_LENGTH, [value]
    while stack:
        items = stack.pop()
        left -= len(items)
        if left < 0:
            return False
        stack.extend(item for item in items if isinstance(item, list))
    return True


def _expand(pattern: Any) -> list[Any]:
    """``[[["global", "local"], 2]]`` → ``["global", "local", "global", "local"]``: run-length lists of layer kinds."""
    out: list[Any] = []
    for kinds, repeat in pattern:
        if not isinstance(repeat, int) or len(out) + len(kinds) * repeat > 4096:
            raise ValueError("repeats must be integers, and at most 4096 entries in all")
        out.extend(list(kinds) * repeat)
    return out


def _sum(values: Any) -> Any:
    """Of numbers only: lists would be put together in quadratic time."""
    if not all(isinstance(value, int | float) for value in values):
        raise TypeError("it takes a list of numbers")
    return sum(values)


def _round_to(value: float, dtype: str | None) -> float:
    """`value` as a scalar of `dtype` holds it: ``round_to(55.43, "bfloat16") == 55.5``. Other dtypes leave it alone."""
    import numpy as np

    if not isinstance(value, int | float):
        raise TypeError("it takes a number")
    if not abs(value) < 1e30:
        return value
    if dtype == "bfloat16":
        bits = int(np.float32(value).view(np.uint32))
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return float(np.uint32(bits).view(np.float32))
    return float(np.float16(value)) if dtype == "float16" else value


FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "abs": abs,
        "bool": bool,
        "ceil": math.ceil,
        "default": lambda *values: next((v for v in values if v is not None), None),
        "endswith": lambda s, tail: isinstance(s, str) and s.endswith(tail),
        "exp": math.exp,
        "expand": _expand,
        "float": float,
        "floor": math.floor,
        "int": int,
        "is_list": lambda value: isinstance(value, list | tuple),
        "len": len,
        "log": math.log,
        "max": max,
        "min": min,
        "round": round,
        "round_to": _round_to,
        "sqrt": math.sqrt,
        "startswith": lambda s, head: isinstance(s, str) and s.startswith(head),
        "sum": _sum,
    }
)


class Scope:
    """Where names are looked up. `lookup` raises KeyError for an unknown name; `names` serves suggestions."""

    def lookup(self, name: str) -> Any:
        raise KeyError(name)

    def names(self) -> Sequence[str]:
        return ()

    def has(self, tensor: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return False

    def touch(self, where: Where) -> None:
        """Told of every value that is read, by where it was written (the linter lists those that never are)."""

    def spend(self, work: int, where: Where) -> None:
        """Told of all work, about a microsecond each; SpecError when a spec takes too much of it."""


class DictScope(Scope):
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def lookup(self, name: str) -> Any:
        return self.values[name]

    def names(self) -> Sequence[str]:
        return list(self.values)


def column_of(node: ast.AST, where: Where, text: str) -> Where:
    """The place of `node` inside the string `text` that starts at `where` (its opening quote); the string itself when it
    has several lines."""
    if not where.line or "\n" in text:
        return where
    code = text.lstrip()
    before = code.encode()[: getattr(node, "col_offset", 0)].decode(errors="ignore")  # ast counts bytes
    return where.shift(where.quote + len(text) - len(code) + len(before))


@lru_cache(maxsize=8192)
def _parse(text: str, mode: str) -> ast.AST | str:
    if len(text) > MAX_CHARS:
        return f"an expression has at most {MAX_CHARS} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. `1 is 1`; a spec's style is not our business
            tree = ast.parse(text.strip(), mode=mode)
    except SyntaxError as error:
        return f"{error.msg} at character {error.offset or 0}"
    except (RecursionError, MemoryError, ValueError) as error:
        return f"cannot be read ({type(error).__name__})"
    return tree


def read_tree(text: str, mode: str, where: Where) -> ast.AST:
    """The syntax tree as Python has it, unchecked; SpecError if there is none."""
    tree = _parse(text, mode)
    if isinstance(tree, str):
        what = "an expression" if mode == "eval" else "an assignment"
        raise SpecError(f"'{text[:80]}' is not {what}: {tree}", where=str(where), fix="see model_specs/README.md")
    return tree


def parse_tree(text: str, mode: str, where: Where, allowed: tuple[type, ...]) -> ast.AST:
    """Parse and check against `allowed` and the bounds; SpecError otherwise."""
    tree = read_tree(text, mode, where)
    count = 0
    stack = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise SpecError("the expression is too large", where=str(where), fix="split it with [let] names")
        if not isinstance(node, allowed) or (isinstance(node, ast.Name) and node.id.startswith("_")):
            what = getattr(node, "id", type(node).__name__.lower())
            raise SpecError(
                f"'{what}' is not allowed in '{text[:80]}'",
                where=str(column_of(node, where, text)),
                fix="expressions have names, numbers, strings, lists, a.b, a[i], arithmetic, comparisons, and/or/not, "
                "'x if c else y' and the listed functions",
            )
        stack.extend((child, depth + 1) for child in ast.iter_child_nodes(node))
    return tree


def parse_expression(text: str, where: Where) -> ast.expr:
    """The checked syntax tree of one expression."""
    tree = parse_tree(text, "eval", where, _ALLOWED)
    assert isinstance(tree, ast.Expression)
    return tree.body


def evaluate(text: str, scope: Scope | Mapping[str, Any], where: Where | None = None) -> Any:
    """The value of `text` in `scope`."""
    place = where or Where()
    names = scope if isinstance(scope, Scope) else DictScope(scope)
    return Evaluator(names, place, text).visit(parse_expression(text, place))


class Evaluator:
    """Walks a checked tree. Subclasses add what a flow needs (tensors, parts, primitives)."""

    def __init__(self, scope: Scope, where: Where, text: str) -> None:
        self.scope = scope
        self.where = where
        self.text = text

    def fail(self, node: ast.AST, reason: str, fix: str = "") -> SpecError:
        return SpecError(f"{reason} in '{self.text[:120]}'", where=str(column_of(node, self.where, self.text)), fix=fix)

    def visit(self, node: ast.AST) -> Any:
        self.scope.spend(1, self.where)
        return getattr(self, f"visit_{type(node).__name__}")(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        if node.value is not None and not isinstance(node.value, bool | int | float | str):
            raise self.fail(node, f"a {type(node.value).__name__} literal is not allowed", "write a number or a string")
        return self.bounded(node, node.value)

    def visit_Name(self, node: ast.Name) -> Any:
        try:
            return self.scope.lookup(node.id)
        except KeyError:
            raise self.fail(node, f"unknown name '{node.id}'", self.name_fix(node.id)) from None

    def name_fix(self, name: str) -> str:
        if name == "i":
            return "i is the layer, which is known only inside a stack"
        return did_you_mean(name, [*self.scope.names(), *FUNCTIONS]) or "define it in [let]"

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        value = self.visit(node.value)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(
                node, f"'{ast.unparse(node.value)}' has no keys: it is {show(value)}", "only tables have keys"
            )
        return self.bounded(node, value.get(node.attr))

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        value, index = self.visit(node.value), self.visit(node.slice)
        if value is None:
            return None
        if not isinstance(value, Mapping | list | tuple | str):
            reason = f"'{ast.unparse(node.value)}' is {show(value)}: it has no entries"
            raise self.fail(node, reason, "only lists and tables have; is_list(x) tells which it is")
        if isinstance(value, Mapping) and not isinstance(index, str):
            reason = f"'{ast.unparse(node.value)}' is a table, and '{show(index)}' no key of it"
            raise self.fail(node, reason, "a list is meant; check the config")
        try:
            return value.get(index) if isinstance(value, Mapping) else value[index]
        except (IndexError, TypeError) as error:
            raise self.fail(node, f"'{ast.unparse(node)}': {error}", "check the length of the list") from None

    def visit_List(self, node: ast.List | ast.Tuple) -> Any:
        return self.bounded(node, [self.visit(item) for item in node.elts])

    visit_Tuple = visit_List

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        return self.visit(node.body if self.truth(node.test, self.visit(node.test)) else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        stop_at = isinstance(node.op, ast.Or)
        value: Any = None
        for item in node.values:
            value = self.visit(item)
            if self.truth(item, value) is stop_at:
                break
        return value

    def visit_Compare(self, node: ast.Compare) -> bool:
        left = self.comparable(node, self.visit(node.left))
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.comparable(node, self.visit(right_node))
            try:
                if not _COMPARE[type(op)](left, right):
                    return False
            except TypeError:
                side, value = (node.left, left) if left is None else (right_node, right)
                reason = f"cannot compare: {self.describe(side, value)}"
                raise self.fail(node, reason, "give it a value or a fallback with 'or'") from None
            left = right
        return True

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return not self.truth(node.operand, value)
        return self.negate(node, value) if isinstance(node.op, ast.USub) else value

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        return self.binary(node, self.visit(node.left), self.visit(node.right))

    def visit_Call(self, node: ast.Call) -> Any:
        if not isinstance(node.func, ast.Name):
            raise self.fail(node, "only a plain name can be called", "methods are not available")
        return self.call(node, node.func.id)

    # ------------------------------------------------------------------ what a subclass may widen

    def truth(self, node: ast.AST, value: Any) -> bool:
        return bool(value)

    def comparable(self, node: ast.AST, value: Any) -> Any:
        return value

    def negate(self, node: ast.UnaryOp, value: Any) -> Any:
        if not isinstance(value, int | float):
            raise self.fail(node.operand, self.describe(node.operand, value), "a sign goes before a number")
        return -value

    def binary(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        op = type(node.op)
        text_or_list = op is ast.Add and isinstance(left, str | list) and type(left) is type(right)
        if not text_or_list:
            for side, value in ((node.left, left), (node.right, right)):
                if not isinstance(value, int | float):
                    raise self.fail(side, self.describe(side, value), "give it a value or a fallback with 'or'")
        if op is ast.Pow and (abs(right) > MAX_EXPONENT or abs(left) > 1e12):
            raise self.fail(node, f"the power {left} ** {right} is out of bounds", f"exponents go up to {MAX_EXPONENT}")
        try:
            return self.bounded(node, _OPERATORS[op](left, right))
        except (ZeroDivisionError, OverflowError, ValueError, TypeError) as error:
            raise self.fail(node, f"cannot compute '{ast.unparse(node)}': {error}", "check the numbers") from None

    def call(self, node: ast.Call, name: str) -> Any:
        if name == "has" and len(node.args) == 1 and not node.keywords:
            return self.scope.has(str(self.visit(node.args[0])))
        if name == "default" and not node.keywords:  # the rest is not looked at
            return next((value for value in map(self.visit, node.args) if value is not None), None)
        if name not in FUNCTIONS:
            raise self.fail(
                node, f"unknown function '{name}'", did_you_mean(name, FUNCTIONS) or "see model_specs/README.md"
            )
        if node.keywords:
            raise self.fail(node, f"{name}() takes no keywords", "give its arguments by position")
        args = [self.visit(a) for a in node.args]
        try:
            return self.bounded(node, FUNCTIONS[name](*args))
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise self.fail(node, f"{name}() failed: {error}", "check its arguments") from None

    def bounded(self, node: ast.AST, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise self.fail(node, "the integer does not fit in 64 bits", "write it as a float")
        if (isinstance(value, str) and len(value) > MAX_LENGTH) or (isinstance(value, list) and not _short(value)):
            raise self.fail(node, "the value is too long", f"strings and lists have at most {MAX_LENGTH} elements")
        if isinstance(value, complex):
            raise self.fail(node, "the value is complex", "check the sign under the root")
        if isinstance(value, str | list):
            self.scope.spend(len(value), self.where)
        return value

    def describe(self, node: ast.AST, value: Any) -> str:
        text = ast.unparse(node)
        return f"'{text}' is missing (None)" if value is None else f"'{text}' is {show(value)}, not a number"
