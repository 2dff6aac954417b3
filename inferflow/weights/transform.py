"""One transform for every stored layout: name the axes, cut along one, put them in another order, map the values.

``axes = "(h part hd) in -> part h hd in"`` views each stored dimension as the named axes (einops notation), ``split =
"part"`` with ``sizes`` cuts that axis into the comma-separated roles of the entry, and the result is flattened back,
group by group. A bias uses the same entry with the trailing axis of the result left out. Shapes are computed without
reading anything.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import SpecError
from ..spec.document import Where
from ..spec.expression import Evaluator, Scope, parse_expression

__all__ = ["Transform", "parse_axes"]

Groups = tuple[tuple[str, ...], ...]


def parse_axes(text: str, where: Where) -> tuple[Groups, Groups]:
    """The groups left and right of ``->`` (the same when there is none)."""
    left, arrow, right = text.partition("->")
    lhs = _groups(left, where)
    rhs = _groups(right, where) if arrow else lhs
    a, b = sorted(n for g in lhs for n in g), sorted(n for g in rhs for n in g)
    if a != b or len(set(a)) != len(a) or not a:
        reason = f"axes '{text}' must name each axis once on either side"
        gone = sorted(set(a) - set(b))
        if gone and not set(b) - set(a) and rhs:  # an axis of one element is not dropped, but joined to its neighbour
            reason += f"; '{gone[0]}' is on the left only"
            words = " ".join([*gone, *rhs[0]])
            fixed = " ".join([f"({words})", *(f"({' '.join(g)})" if len(g) > 1 else g[0] for g in rhs[1:])])
            raise SpecError(
                reason, where=str(where), fix=f'an axis of one element is kept in a group: "{left.strip()} -> {fixed}"'
            )
        raise SpecError(reason, where=str(where), fix='e.g. "in out -> out in"')
    return lhs, rhs


def _groups(text: str, where: Where) -> Groups:
    out: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(" and inside is None:
            inside = []
        elif word == ")" and inside is not None:
            out.append(tuple(inside))
            inside = None
        elif word.isidentifier() and inside is not None:
            inside.append(word)
        elif word.isidentifier():
            out.append((word,))
        else:
            raise SpecError(f"axes '{text}' cannot be read at '{word}'", where=str(where), fix='e.g. "(h part hd) in"')
    if inside is not None:
        raise SpecError(f"axes '{text}' has an open bracket", where=str(where), fix="close it")
    return tuple(out)


@dataclass(frozen=True)
class Transform:
    """A parsed entry for one role. `part` is which of the cut's pieces the role takes; `known` are the sizes given."""

    lhs: Groups
    rhs: Groups
    split: str | None
    sizes: tuple[int, ...]
    part: int
    known: Mapping[str, int]
    value: str | None
    where: Where
    value_at: Where

    @property
    def ident(self) -> tuple[Any, ...]:
        """The same for two transforms that give the same of the same tensor."""
        known = tuple(sorted(self.known.items()))
        return (self.lhs, self.rhs, self.split, self.sizes, self.part, known, self.value)

    def drop_trailing(self) -> Transform:
        """The same for a bias: without the last group of the result."""
        gone = set(self.rhs[-1])
        lhs = tuple(g for g in self.lhs if not set(g) <= gone)
        return replace(self, lhs=lhs, rhs=self.rhs[:-1])

    def solve(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The size of every axis, from the stored shape; SpecError when they do not fit."""
        if len(shape) != len(self.lhs):
            text = " ".join(f"({' '.join(g)})" if len(g) > 1 else g[0] for g in self.lhs)
            raise self.fail(f"axes '{text}' describe {len(self.lhs)} dimensions, the file has shape {list(shape)}")
        sizes = dict(self.known)
        if self.split is not None:
            sizes[self.split] = sum(self.sizes)
        for group, size in zip(self.lhs, shape, strict=True):
            open_axes = [n for n in group if n not in sizes]
            known = math.prod(sizes[n] for n in group if n in sizes)
            if len(open_axes) > 1:
                raise self.fail(f"axes {', '.join(open_axes)} have no size", f"give {open_axes[0]} = N")
            if len(open_axes) == 1 and known and size % known == 0:
                sizes[open_axes[0]] = size // known
            elif open_axes or known != size:
                raise self.fail(f"({' '.join(group)}) with {known} elements does not fit the stored size {size}")
        return sizes

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The result's shape."""
        sizes = self.solve(stored)
        if self.split is not None:
            sizes[self.split] = self.sizes[self.part]
        return tuple(math.prod(sizes[n] for n in group) for group in self.rhs)

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The result (a view where the layout allows)."""
        sizes = self.solve(array.shape)
        flat = [n for group in self.lhs for n in group]
        out = array.reshape([sizes[n] for n in flat])
        if self.split is not None:
            start = sum(self.sizes[: self.part])
            cut = slice(start, start + self.sizes[self.part])
            out = out[tuple(cut if n == self.split else slice(None) for n in flat)]
        order = [flat.index(n) for group in self.rhs for n in group]
        return out.transpose(order).reshape(self.shape(array.shape))

    def rows(self, stored: tuple[int, ...]) -> np.ndarray | None:
        """Where each row of the result is among the rows (along the last axis) of a tensor of shape `stored`: int64, flat.
        None where the transform takes rows apart, or leaves all as it is."""
        if not self.lhs or self.lhs[-1] != self.rhs[-1] or self.split in self.lhs[-1]:
            return None
        lead = stored[:-1]
        return self.drop_trailing().apply(np.arange(math.prod(lead)).reshape(lead)).reshape(-1)

    def fail(self, reason: str, fix: str = "check axes, sizes and the config") -> SpecError:
        return SpecError(reason, where=str(self.where), fix=fix)


def _unit_rows(w: np.ndarray) -> np.ndarray:
    return np.sqrt((w * w).sum(-1, keepdims=True))


_MAPS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {
        "exp": np.exp,
        "log": np.log,
        "sqrt": np.sqrt,
        "abs": np.abs,
        "softplus": lambda w: np.logaddexp(0, w),
        "norm": _unit_rows,
    }
)


class _ArrayEvaluator(Evaluator):
    """Element-wise expressions over ``w``: arithmetic, exp, log, sqrt, abs, softplus, and norm(w) (of each row)."""

    def truth(self, node: ast.AST, value: Any) -> bool:
        self.comparable(node, value)
        return bool(value)

    def comparable(self, node: ast.AST, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            raise self.fail(node, "a condition cannot depend on the tensor", "it is settled before anything is read")
        return value

    def negate(self, node: ast.UnaryOp, value: Any) -> Any:
        return -value if isinstance(value, np.ndarray) else super().negate(node, value)

    def binary(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
            kinds = {ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide}
            operation = kinds.get(type(node.op))
            if operation is None or not all(isinstance(side, np.ndarray | int | float) for side in (left, right)):
                raise self.fail(node, "a tensor takes + - * / with numbers and tensors", 'e.g. value = "w + 1"')
            return operation(left, right)
        return super().binary(node, left, right)

    def call(self, node: ast.Call, name: str) -> Any:
        args = [self.visit(a) for a in node.args]
        if name in _MAPS and len(args) == 1 and isinstance(args[0], np.ndarray):
            return _MAPS[name](args[0])
        return super().call(node, name)


class _WithTensor(Scope):
    def __init__(self, w: np.ndarray, scope: Scope) -> None:
        self.w = w
        self.outer = scope

    def lookup(self, name: str) -> Any:
        return self.w if name == "w" else self.outer.lookup(name)

    def names(self) -> Sequence[str]:
        return ["w", *_MAPS, *self.outer.names()]

    def spend(self, work: int, where: Where) -> None:
        self.outer.spend(work, where)


def map_values(text: str, w: np.ndarray, scope: Scope, where: Where) -> np.ndarray:
    """``value``: an expression in ``w``, which must keep the shape."""
    out = _ArrayEvaluator(_WithTensor(w, scope), where, text).visit(parse_expression(text, where))
    if not isinstance(out, np.ndarray) or out.shape != w.shape:
        raise SpecError(
            f"value '{text}' must give a tensor of the same shape", where=str(where), fix='e.g. value = "w + 1"'
        )
    return out.astype(np.float32, copy=False)
