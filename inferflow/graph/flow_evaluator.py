"""What the expressions of a flow mean: a node where a tensor is involved, a plain value where none is."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import GraphError, SpecError, did_you_mean
from ..spec.expression import FUNCTIONS, Evaluator, column_of
from ..spec.flow import Assignment
from ..spec.signature import ACTIVATIONS, LARGEST, check_type
from .graph import Value
from .primitives import PRIMITIVES, UNARY, Primitive
from .scope import TableValue, resolve_node

if TYPE_CHECKING:
    from .build import Builder, Frame

__all__ = ["OF_TENSORS", "REDUCE", "FlowEvaluator", "tensors"]

_BINARY = MappingProxyType({ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"})
_NEUTRAL = MappingProxyType({"add": 0, "sub": 0, "mul": 1, "div": 1, "pow": 1})
REDUCE = ("sum", "mean", "max", "softmax")
_INNER = ("act", "binary", "reduce", "select")  # written in other ways, or put in by the builder
OF_TENSORS = tuple(
    dict.fromkeys(
        [*(p.name for p in PRIMITIVES.values() if not p.owns_weights and p.name not in _INNER), *UNARY, *REDUCE, "min"]
    )
)  # all that can be called with tensors, besides parts
_POSITIONS = MappingProxyType({"rope": 1, "sdpa": 3})  # where the positions go among the inputs; nobody writes them


def tensors(low: int, high: int) -> str:
    """How many tensors something takes, in words."""
    return f"{low} to {high} tensors" if low != high else f"{low} tensor{'s' * (low != 1)}"


class FlowEvaluator(Evaluator):
    """Expressions over tensors: what `Evaluator` computes, or a node when a tensor is involved."""

    def __init__(self, builder: Builder, frame: Frame, line: Assignment) -> None:
        super().__init__(frame.scope, line.where, line.text)
        self.builder = builder
        self.frame = frame
        self.target = f"{frame.path}.{line.targets[0]}" if frame.path else line.targets[0]

    def fail(self, node: ast.AST, reason: str, fix: str = "") -> SpecError:
        where = str(column_of(node, self.where, self.text))
        return GraphError(f"{reason} in '{self.text}'" + self.inside(), where=where, fix=fix)

    def inside(self) -> str:
        return f" of {self.frame.path}" if self.frame.path else ""

    def emit(self, op: str, inputs: list[Value], params: Mapping[str, Any]) -> Any:
        made = self.builder.emit(op, inputs, params, self.target)
        return made if len(made) > 1 else made[0]

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id in self.frame.env:
            return self.frame.env[node.id]
        if node.id in self.frame.parts and "block" in self.frame.parts[node.id]:
            return self.builder.call_part(node.id, self.frame.parts[node.id], [], self.frame)
        if node.id in self.builder.inputs:
            return self.builder.inputs[node.id]
        return super().visit_Name(node)

    def truth(self, node: ast.AST, value: Any) -> bool:
        if isinstance(value, Value):
            raise self.fail(
                node, f"'{ast.unparse(node)}' is a tensor", "conditions are settled when the model is loaded"
            )
        return bool(value)

    def comparable(self, node: ast.AST, value: Any) -> Any:
        if isinstance(value, Value):
            raise self.fail(node, "tensors cannot be compared", "conditions are settled when the model is loaded")
        return value

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.no_tensor(node.value)
        return super().visit_Attribute(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        self.no_tensor(node.value)
        return super().visit_Subscript(node)

    def no_tensor(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name) and isinstance(self.frame.env.get(node.id), Value):
            raise self.fail(node, f"'{node.id}' is a tensor", "cut it with heads(x, n) or split(x, sizes)")

    def name_fix(self, name: str) -> str:
        known = [*self.frame.env, *self.frame.parts, *self.builder.inputs]
        return did_you_mean(name, known) or super().name_fix(name)

    def negate(self, node: ast.UnaryOp, value: Any) -> Any:
        if isinstance(value, Value):
            return self.emit("binary", [value], {"kind": "mul", "number": -1, "swap": False})
        return super().negate(node, value)

    def binary(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        if not isinstance(left, Value) and not isinstance(right, Value):
            return super().binary(node, left, right)
        kind = _BINARY.get(type(node.op))
        if kind is None:
            raise self.fail(node, "tensors have + - * / ** only", "use floor(x / n)")
        return self.combine(node, kind, left, right)

    def combine(self, node: ast.AST, kind: str, left: Any, right: Any) -> Any:
        if isinstance(left, Value) and isinstance(right, Value):
            return self.emit("binary", [left, right], {"kind": kind, "number": None, "swap": False})
        tensor, number = (left, right) if isinstance(left, Value) else (right, left)
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < LARGEST:
            side = node.right if isinstance(node, ast.BinOp) and tensor is left else getattr(node, "left", node)
            raise self.fail(side, self.describe(side, number), "a tensor is combined with tensors and numbers")
        neutral = _NEUTRAL.get(kind)
        if number == neutral and (tensor is left or kind in ("add", "mul")):
            return tensor
        return self.emit("binary", [tensor], {"kind": kind, "number": number, "swap": tensor is not left})

    # ------------------------------------------------------------------ calls

    def call(self, node: ast.Call, name: str) -> Any:
        try:
            return self._call(node, name)
        except SpecError as error:
            if not error.where:
                raise self.fail(node, error.reason, error.fix) from None
            raise

    def _call(self, node: ast.Call, name: str) -> Any:
        owner: Frame | None = self.frame
        while owner is not None and name not in owner.parts:
            owner = owner.outer
        if owner is not None:
            return self.part(node, name, owner)
        if name == "default":
            return super().call(node, name)
        kind = self.activation(name)
        args = [self.visit(a) for a in node.args]
        if kind is not None and len(args) == 1 and isinstance(args[0], Value):
            return args[0] if kind == "identity" else self.emit("act", args, {"kind": kind})
        if name in ("min", "max") and len(args) == 2 and any(isinstance(a, Value) for a in args):
            return self.combine(node, name, *args)
        if name in REDUCE and len(args) == 1 and isinstance(args[0], Value):
            return self.emit("reduce", args, {"kind": name})
        if name in PRIMITIVES and name in OF_TENSORS:
            return self.primitive(node, name, args)
        if (name in FUNCTIONS or name == "has") and not any(isinstance(a, Value) for a in args):
            return super().call(node, name)
        raise self.uncallable(node, name, args)

    def part(self, node: ast.Call, name: str, owner: Frame) -> Any:
        """A part or stack of `owner`'s, called with tensors."""
        if node.keywords:
            raise self.fail(node, f"'{name}' is a part and takes tensors only", "give its parameters in its table")
        args = [self.visit(a) for a in node.args]
        for argument, value in zip(node.args, args, strict=True):
            if value is not None and not isinstance(value, Value):
                reason = f"'{name}' takes tensors, '{ast.unparse(argument)}' is none"
                raise self.fail(argument, reason, "numbers are parameters, and stand in its table")
        call = self.builder.call_stack if "count" in owner.parts[name] else self.builder.call_part
        return call(name, owner.parts[name], args, owner)

    def uncallable(self, node: ast.Call, name: str, args: list[Any]) -> SpecError:
        """The error of a name that is no function of what it was given."""
        tensor = any(isinstance(a, Value) for a in args)
        if name in self.builder.spec.blocks or (name in PRIMITIVES and PRIMITIVES[name].owns_weights):
            fix = f'write a table for the part, with block = "{name}", and call it by its name'
            return self.fail(node, f"'{name}' is a block; a flow calls the parts made of it", fix)
        if name in OF_TENSORS:
            reason = f"'{name}' got {len(args)} arguments" if tensor else f"'{name}' takes a tensor"
        elif name in FUNCTIONS or name == "has":
            reason = f"'{name}' is a function of numbers, not of a tensor"
        else:
            reason = f"'{name}' cannot be called here"
        known = [*self.frame.parts, *OF_TENSORS, *(() if tensor else FUNCTIONS)]
        fix = did_you_mean(name, [word for word in known if word != name])
        return self.fail(node, reason, fix or "call a part of this table, a primitive or an activation")

    def activation(self, name: str) -> str | None:
        """The activation that `name` stands for: a parameter whose value is one, or its own name."""
        try:
            value = self.scope.lookup(name)
        except KeyError:
            if name in PRIMITIVES:  # "linear" is what configs call no activation, in a flow it is meant as the block
                return None
            return ACTIVATIONS.get(name, name if name in UNARY else None)
        if not isinstance(value, str):
            return None
        return value if value in UNARY else ACTIVATIONS.get(value)

    def primitive(self, node: ast.Call, name: str, args: list[Any]) -> Any:
        """A primitive without weights: tensors first, then parameters by position, keyword or ``**table``."""
        primitive = PRIMITIVES[name]
        inputs = [a for a in args if isinstance(a, Value)]
        words = list(primitive.signature)
        numbers = [a for a in args if not isinstance(a, Value)]
        if len(numbers) > len(words):
            raise self.fail(node, f"{name} got {len(numbers)} parameters", f"it has {', '.join(words) or 'none'}")
        given: dict[str, Any] = dict(zip(words, numbers, strict=False))
        for keyword in node.keywords:
            value = self.visit(keyword.value)
            if keyword.arg is None:
                given.update(self.spread(node, keyword, value, words, name))
            elif keyword.arg in primitive.optional and (value is None or isinstance(value, Value)):
                inputs.extend([value] if value is not None else [])
            elif keyword.arg in words:
                given[keyword.arg] = value
            else:
                fix = did_you_mean(keyword.arg, words) or f"it has {', '.join(words)}"
                raise self.fail(node, f"{name} has no parameter '{keyword.arg}'", fix)
        self.count_inputs(node, primitive, len(inputs))
        if primitive.vanishes and given.get(words[0]) is None:
            return inputs[0]
        if name in _POSITIONS:
            inputs.insert(_POSITIONS[name], self.builder.inputs["positions"])
        params = {}
        for word, parameter in primitive.signature.items():
            value = given.get(word)
            if value is None and parameter.default is not None:
                value = Evaluator(self.scope, parameter.where, parameter.default_text).visit(parameter.default)
            elif value is None:
                raise self.fail(node, f"{name} needs '{word}'", f"give {word}")
            params[word] = check_type(parameter, value, column_of(node, self.where, self.text))
        return self.emit(name, inputs, params)

    def count_inputs(self, node: ast.AST, primitive: Primitive, got: int) -> None:
        implied = primitive.name in _POSITIONS
        low, high = (n - implied for n in primitive.inputs)
        if not low <= got <= high:
            raise self.fail(node, f"{primitive.name} takes {tensors(low, high)}, it got {got}", primitive.doc)

    def spread(self, node: ast.Call, keyword: ast.keyword, value: Any, words: list[str], name: str) -> dict[str, Any]:
        if not isinstance(value, TableValue):
            raise self.fail(node, f"'**{ast.unparse(keyword.value)}' is not a table", "give the parameter a table")
        out = {}
        for key, item in value.table.items():
            if key not in words:
                fix = did_you_mean(key, words) or f"it has {', '.join(words)}"
                raise SpecError(f"{name} has no parameter '{key}'", where=str(item.where), fix=fix)
            parameter = PRIMITIVES[name].signature[key]
            given = resolve_node(item, value.scope, parameter)
            out[key] = None if given is None else check_type(parameter, given, item.where)
        return out
