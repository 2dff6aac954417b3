"""`Weights`: a model's parameters, read from its checkpoint when they are first asked for.

`Weights.array` gives one as float32 in the graph's shape; `Weights.stored` gives a matrix (the weight of a linear or an embed)
as engines take it, in the file's own precision or the format chosen for it. Both tell the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import CheckpointError, UnsupportedError
from ..graph.graph import Weight
from ..graph.scope import ModelScope
from .choice import KEEP, Fallback, is_low_bit
from .gguf_keep import KEPT, keep_blocks
from .gguf_types import TYPES, dequantize
from .quantised import QuantisedSource
from .source import Source
from .stored import FLOATS, ROTATION, Stored, from_float, joined, narrowest, quantised
from .tiles import TILE
from .transform import Transform, map_values

__all__ = ["Plan", "Weights"]

Rows = slice | np.ndarray
_NATIVE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_BLOCKS = {kind.name: kind for kind in TYPES.values() if kind.served}
SLAB = 1 << 22  # elements that are widened at a time when a matrix is quantised


@dataclass(frozen=True)
class Plan:
    """How one weight is read: the tensors (stacked along a new first axis when there are several), then the
    transform."""

    weight: Weight
    names: tuple[str, ...]
    stacked: bool
    transform: Transform | None


@dataclass
class Weights:
    """`formats` has the matrices, by key, and the format of each; `fallbacks` those that do not have the one wanted.
    `warnings` are the oddities that do not change the answer."""

    source: Source
    plans: Mapping[str, Plan]
    scope: ModelScope
    formats: Mapping[str, str] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _arrays: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict)
    _stored: dict[tuple[Any, ...], Stored] = field(default_factory=dict)

    def array(self, key: str) -> np.ndarray:
        """Weight `key` as a C-contiguous float32 array of the graph's shape; of a matrix, ``stored(key).widen()``."""
        format_ = self.formats.get(key, KEEP)
        ident = (*self.ident(key), format_)
        if ident not in self._arrays:
            as_it_is = format_ == KEEP  # what is kept is kept exactly, so it needs no stored form here
            self._arrays[ident] = self._read(self.plans[key]) if as_it_is else self.stored(key).widen()
        return self._arrays[ident]

    def stored(self, key: str) -> Stored:
        """Matrix `key` in its format, quantised now where that asks for it. Two keys of one tensor share one object; floats
        that the file has in the wanted format are views of it."""
        format_ = self.formats[key]
        ident = (*self.ident(key), format_)
        if ident not in self._stored:
            self._stored[ident] = self.make(key)
        return self._stored[ident]

    def read(self, key: str) -> np.ndarray:
        """Weight `key` as the file has it, float32 of the graph's shape; not held here."""
        return self._read(self.plans[key])

    def make(self, key: str, rotation: int = ROTATION) -> Stored:
        """As `stored`, made anew and not held here. `rotation`: see `quantised`. CheckpointError where what is converted
        holds numbers that are not finite."""
        plan, format_ = self.plans[key], self.formats[key]
        if format_ == KEEP:
            return self._keep(plan)
        if not is_low_bit(format_):
            return self._as_float(key, format_)
        parts = []
        for slab in self.slabs(key):
            try:
                parts.append(quantised(slab, format_, rotation))
            except ValueError:
                if np.isfinite(slab).all():
                    raise
                raise self.not_finite(key) from None
        return joined(parts, plan.weight.sizes)

    def _as_float(self, key: str, format_: str) -> Stored:
        """In a float format, or in one that holds it where numbers are too large for that: a fallback."""
        array = self._read(self.plans[key])
        stored = from_float(array, format_)
        if format_ == "f32" or stored.finite():
            return stored
        if not np.isfinite(array).all():
            raise self.not_finite(key)
        exact = narrowest(array)
        fallback = Fallback(key, format_, exact.format, f"it holds numbers too large for {format_}")
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)
        return exact

    def not_finite(self, key: str) -> CheckpointError:
        """That weight `key` holds NaN or infinity: names the tensor that does, which is looked for now."""
        plan = self.plans[key]
        where = f"{self.source.path}: tensor '%s'"
        for name in plan.names:
            if not np.isfinite(self.source.read(name)).all():
                reason = "holds numbers that are not finite, or too large for float32"
                return CheckpointError(reason, where=where % name, fix="the file is damaged: download it again")
        reason = f"gives '{key}' numbers that are not finite"
        return CheckpointError(reason, where=where % plan.names[0], fix="check the value of its entry in [tensors]")

    def slabs(self, key: str, elements: int = SLAB) -> Iterator[np.ndarray]:
        """Matrix `key` as float32, some rows (whole tiles, of some `elements`) or one expert at a time, where the file lets
        rows be read by themselves; else all of it, in pieces."""
        plan = self.plans[key]
        *lead, rows, cols = plan.weight.sizes
        total = math.prod((*lead, rows))
        step = rows if lead else max(TILE, elements // cols // TILE * TILE)
        if (
            plan.stacked
            and len(plan.names) == math.prod(lead)
            and (plan.transform is None or plan.transform.value is None)
        ):
            for name in plan.names:
                one = Plan(replace(plan.weight, shape=plan.weight.shape[-2:]), (name,), False, plan.transform)
                yield self._read(one)[None]
            return
        read = self._row_reader(plan)
        if read is None:
            whole = self._read(plan).reshape(total, cols)
            read = whole.__getitem__
        for start in range(0, total, step):
            slab = read(slice(start, start + step))
            yield slab[None] if lead else slab

    def rows(self, key: str, index: np.ndarray) -> np.ndarray:
        """Rows of matrix `key`, [rows, cols], as the file has them: float32 [*index.shape, cols]."""
        plan = self.plans[key]
        read = self._row_reader(plan)
        unique, places = np.unique(index, return_inverse=True)
        found = self._read(plan)[unique] if read is None else read(unique)
        return found[places.reshape(index.shape)]

    def _row_reader(self, plan: Plan) -> Callable[[Rows], np.ndarray] | None:
        """A function that reads some rows of a matrix, its experts taken as one tall matrix. None where the file or the
        transform does not leave rows whole."""
        info, made = self.source.tensors[plan.names[0]], plan.transform
        kind = _BLOCKS.get(info.dtype)
        order = None if made is None else made.rows(info.shape)
        untouched = made is None or (made.value is None and (order is not None or not made.lhs))
        if len(plan.names) > 1 or kind is None or not untouched or info.shape[-1:] != plan.weight.sizes[-1:]:
            return None
        try:
            raw = self.source.raw(plan.names[0]).reshape(math.prod(info.shape[:-1]), -1)
        except UnsupportedError:
            return None

        def read(index: Rows) -> np.ndarray:
            rows = raw[index] if order is None else raw[order[index]]
            data = np.ascontiguousarray(rows).reshape(-1)
            return dequantize(data, kind, (len(rows), info.shape[-1])).astype(np.float32, copy=False)

        return read

    def ident(self, key: str) -> tuple[Any, ...]:
        """The same for two weights that are one tensor, read alike."""
        plan = self.plans[key]
        made = plan.transform
        layer = plan.weight.layer if made is not None and made.value is not None else None  # a value may mention i
        changed = made is not None and bool(made.lhs or made.value)  # an entry without either is the tensor itself
        return (plan.names, made.ident if made is not None and changed else None, plan.weight.sizes, layer)

    # ------------------------------------------------------------------ as float32

    def _read(self, plan: Plan) -> np.ndarray:
        out = np.ascontiguousarray(self._arranged(plan, self.source.read), dtype=np.float32)
        if plan.transform is not None and plan.transform.value is not None:
            scope = self.scope.at(plan.weight.layer if plan.weight.layer >= 0 else None)
            out = map_values(plan.transform.value, out, scope, plan.transform.value_at)
        return out

    def _arranged(self, plan: Plan, read: Any) -> np.ndarray:
        """The plan's tensors, as `read` gives them, in the graph's order and shape."""
        parts = []
        for name in plan.names:
            array = read(name)
            if plan.transform is not None and plan.transform.lhs:
                array = plan.transform.apply(array)
            parts.append(array)
        out: np.ndarray = np.stack(parts) if plan.stacked else parts[0]
        return out.reshape(plan.weight.sizes)

    # ------------------------------------------------------------------ as it is stored

    def _keep(self, plan: Plan) -> Stored:
        """The matrix with nothing lost: as it is in the file where the layout allows, else in the narrowest exact float."""
        if isinstance(self.source, QuantisedSource) and plan.names[0] in self.source.packed:
            return self.source.stored(plan.names[0])
        kinds = {self.source.tensors[name].dtype for name in plan.names}
        kind = kinds.pop()
        if not kinds and (plan.transform is None or plan.transform.value is None):
            if kind in _NATIVE and (floats := self._floats(plan, _NATIVE[kind])) is not None:
                return floats
            if kind in KEPT and self.source.format == "gguf" and (tiles := self._tiles(plan, kind)) is not None:
                return tiles
        return narrowest(self._read(plan))

    def _floats(self, plan: Plan, format_: str) -> Stored | None:
        def view(name: str) -> np.ndarray:
            return self.source.raw(name).reshape(-1).view(FLOATS[format_]).reshape(self.source.tensors[name].shape)

        try:
            array = self._arranged(plan, view)
        except UnsupportedError:  # its bytes are not contiguous in the file
            return None
        return Stored(format_, plan.weight.sizes, np.require(array, requirements=["C", "A"]))

    def _tiles(self, plan: Plan, kind: str) -> Stored | None:
        """Blocks in tiles. None where the transform does not leave the rows whole."""
        *lead, rows, cols = plan.weight.sizes
        matrices: list[np.ndarray] = []
        for name in plan.names:
            shape = self.source.tensors[name].shape
            order = None if plan.transform is None else plan.transform.rows(shape)
            if shape[-1] != cols or (order is None and plan.transform is not None and plan.transform.lhs):
                return None
            raw = self.source.raw(name)
            matrices.extend(_take(raw.reshape(-1, raw.shape[-1]), order).reshape(-1, rows, raw.shape[-1]))
        kept = [keep_blocks(matrix, kind, _BLOCKS[kind].weights, _BLOCKS[kind].nbytes) for matrix in matrices]

        def joined(parts: list[Any]) -> np.ndarray:
            array = np.stack(parts) if len(parts) > 1 else parts[0]
            return array.reshape(*lead, *parts[0].shape)

        mins = joined([part.mins for part in kept]) if KEPT[kind].has_min else None
        codes, scales = joined([part.codes for part in kept]), joined([part.scales for part in kept])
        return Stored(KEPT[kind].format, plan.weight.sizes, codes, KEPT[kind].group, 0, scales, mins)


def _take(rows: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """`rows` in `order`, as a view where that is a run."""
    if order is None:
        return rows
    if np.array_equal(order, np.arange(order[0], order[0] + len(order))):
        return rows[order[0] : order[0] + len(order)]
    return rows[order]
