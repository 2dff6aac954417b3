"""Signatures: the closed set of parameters of a block or primitive, one ``"type"`` or ``"type = default"`` string each.

Types are ``int``, ``number``, ``bool``, ``axis`` (a size that names a tensor axis), ``act`` (the name of an activation),
``list``, ``table``, ``any``, or a choice of words ``half | inter``. A choice parameter takes one of its words as it stands and
everything else as an expression that yields one. Without a default a parameter is required; ``= None`` makes it optional.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import SpecError, did_you_mean
from .document import Leaf, Table, Where
from .expression import parse_expression, show

__all__ = ["ACTIVATIONS", "Parameter", "Signature", "check_type", "parse_signature"]

LARGEST = 3.4e38  # of a number: it will be float32
TYPES = ("int", "number", "bool", "axis", "act", "list", "table", "any")
# What configs call the activations -> the primitive's name. "gelu" is the exact one (erf).
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu",
        "relu": "relu", "relu2": "relu2", "sigmoid": "sigmoid", "tanh": "tanh", "softplus": "softplus",
        "linear": "identity", "identity": "identity",
    }
)  # fmt: skip
Signature = Mapping[str, "Parameter"]


@dataclass(frozen=True)
class Parameter:
    """One declared parameter. `default` is an expression evaluated among the other parameters; None when required."""

    name: str
    type: str
    choices: tuple[str, ...]
    default: ast.expr | None
    default_text: str
    where: Where

    @property
    def optional(self) -> bool:
        return isinstance(self.default, ast.Constant) and self.default.value is None


def parse_signature(table: Table) -> Signature:
    """Parameters by name, in the order written."""
    return MappingProxyType({name: _parameter(name, node) for name, node in table.items()})


def _parameter(name: str, node: Leaf | Table) -> Parameter:
    where = node.where
    text = node.value if isinstance(node, Leaf) else None
    if not isinstance(text, str):
        raise SpecError(f"parameter '{name}' needs a type", where=str(where), fix=f'write {name} = "int" or "int = 1"')
    kind, _, default = (part.strip() for part in text.partition("="))
    choices = tuple(word.strip() for word in kind.split("|")) if kind not in TYPES else ()
    choices = tuple(ACTIVATIONS) if kind == "act" else choices
    if kind not in TYPES and (len(choices) < 2 or not all(word.isidentifier() for word in choices)):
        fix = did_you_mean(kind, TYPES) or f"types are {', '.join(TYPES)}, or words: a | b"
        raise SpecError(f"'{kind}' is not a type", where=str(where), fix=fix)
    if not default:
        return Parameter(name, kind, choices, None, "", where)
    tree = ast.Constant(default) if default in choices else parse_expression(default, where)
    return Parameter(name, kind, choices, tree, default, where)


def check_type(parameter: Parameter, value: Any, where: Where) -> Any:
    """`value` if it has the parameter's type (integral floats become int); SpecError otherwise."""
    if value is None and parameter.optional:
        return None
    kind = parameter.type
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    if kind in ("int", "axis") and isinstance(value, float) and value.is_integer():
        value = int(value)
    good = {
        "int": number and isinstance(value, int) and abs(value) < 1 << 62,
        "axis": isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31,
        "number": number,
        "bool": isinstance(value, bool),
        "list": isinstance(value, list | tuple),
        "table": isinstance(value, Mapping) or value is True,
        "any": True,
    }.get(kind, isinstance(value, str) and value in parameter.choices)
    if not good:
        want = (
            f"one of {', '.join(parameter.choices)}"
            if parameter.choices
            else {"axis": "a positive int", "table": "a table"}.get(kind, kind)
        )
        what = "missing (None)" if value is None else show(value)
        fix = did_you_mean(str(value), parameter.choices) or "check it, or the config key it reads"
        raise SpecError(f"'{parameter.name}' must be {want}, it is {what}", where=str(where), fix=fix)
    return ACTIVATIONS[value] if kind == "act" else value
