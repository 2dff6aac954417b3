"""From a graph's weights to a checkpoint's tensors: every weight gets exactly one, every tensor is used or known junk.

`plan_weights` resolves names and proves shapes from the headers; nothing is read before all of that holds.
`Weights.array` then reads, dequantises and transforms one weight when it is first asked for.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CheckpointError, InferflowError, SpecError, did_you_mean
from ..graph.graph import Graph, Weight
from ..graph.scope import ModelScope, resolve_node
from ..spec.document import Leaf, Node, Table, Where
from ..spec.library import Spec, plain
from .source import Source, TensorInfo
from .transform import Transform, map_values, parse_axes

__all__ = ["Plan", "Weights", "plan_weights"]

ENTRY_KEYS = ("from", "axes", "split", "sizes", "value", "if")
# Tensors that checkpoints carry and no forward pass reads.
JUNK = re.compile(
    r"(rotary_emb\.inv_freq|\.attn(ention)?\.(masked_)?bias|position_ids|num_batches_tracked|rotary_pos_emb\.inv_freq)$"
)
# GGUF converters may keep these fused; the parts follow one another along the output axis.
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}


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
    """A model's parameters, read on demand and kept. `warnings` are the oddities that do not change the answer."""

    source: Source
    plans: Mapping[str, Plan]
    scope: ModelScope
    warnings: list[str] = field(default_factory=list)
    _cache: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict)

    def array(self, key: str) -> np.ndarray:
        """Weight `key` as a C-contiguous float32 array of the graph's shape."""
        plan = self.plans[key]
        ident = (
            plan.names,
            plan.transform and (plan.transform.part, plan.transform.lhs, plan.transform.rhs),
            plan.weight.sizes,
        )
        if ident not in self._cache:
            self._cache[ident] = self._read(plan)
        return self._cache[ident]

    def _read(self, plan: Plan) -> np.ndarray:
        parts = []
        for name in plan.names:
            array = self.source.read(name)
            if plan.transform is not None and plan.transform.lhs:
                array = plan.transform.apply(array)
            parts.append(array)
        out = np.stack(parts) if plan.stacked else parts[0]
        out = np.ascontiguousarray(out.reshape(plan.weight.sizes), dtype=np.float32)
        if plan.transform is not None and plan.transform.value is not None:
            scope = self.scope.at(plan.weight.layer if plan.weight.layer >= 0 else None)
            out = map_values(plan.transform.value, out, scope, plan.transform.where)
        return out


def plan_weights(graph: Graph, spec: Spec, config: Mapping[str, Any], source: Source) -> Weights:
    """Resolve every weight of `graph` in `source`. Raises CheckpointError (missing, misshapen or unused tensors: all
    of them are listed) or SpecError (a bad entry)."""
    planner = _Planner(graph, spec, config, source)
    plans: dict[str, Plan] = {}
    problems: list[str] = []
    for key, weight in graph.weights.items():
        try:
            plans[key] = planner.plan(weight)
        except CheckpointError as error:
            problems.append(str(error))
    used = {name for plan in plans.values() for name in plan.names}
    unused, warnings = planner.unused(used)
    problems.extend(unused)
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise CheckpointError(
            "; ".join(problems[:8]) + more,
            where=str(source.path),
            fix="the checkpoint is incomplete or the spec does not describe it: 'inferflow spec check' lists everything",
        )
    return Weights(source, plans, planner.scope, warnings)


def weight_problems(
    graph: Graph, spec: Spec, config: Mapping[str, Any], source: Source, read: set[Where]
) -> Iterator[InferflowError]:
    """Every problem on its own, for the linter; `read` receives the places of all entries and names that were used."""
    planner = _Planner(graph, spec, config, source)
    used: set[str] = set()
    for weight in graph.weights.values():
        try:
            used.update(planner.plan(weight).names)
        except InferflowError as error:
            yield error
            used.update(planner.candidates_used)
    unused, _ = planner.unused(used)
    read |= planner.scope.read
    for text in unused:
        yield CheckpointError(text, where=str(source.path), fix="map it in [tensors], or list it in tensors.ignore")


class _Planner:
    def __init__(self, graph: Graph, spec: Spec, config: Mapping[str, Any], source: Source) -> None:
        self.graph = graph
        self.spec = spec
        self.source = source
        self.scope = ModelScope(spec.tree.table("let"), config, source.tensors)
        self.gguf = source.format == "gguf"
        self.tables = spec.tree.table("gguf").table("tensors") if self.gguf else spec.tree.table("tensors")
        prefixes = spec.value("match", "prefix") or [""]
        self.prefixes = [""] if self.gguf else [prefixes] if isinstance(prefixes, str) else list(prefixes)
        self.weights = graph.weights
        self.candidates_used: tuple[str, ...] = ()

    # ------------------------------------------------------------------ one weight

    def plan(self, weight: Weight) -> Plan:
        """The plan of one weight, its shape proved."""
        self.candidates_used = ()
        tried: list[str] = []
        scope = self.scope.at(weight.layer if weight.layer >= 0 else None)
        for entry, exact, part in self.entries(weight):
            found = self.find(entry, exact, part, weight, scope, tried)
            if found is not None:
                self.candidates_used = found.names
                return self.checked(found)
        if self.gguf and (fused := self.fused(weight)) is not None:
            return self.checked(fused)
        raise CheckpointError(
            f"'{weight.key}' has no tensor in the file",
            where=str(self.source.path),
            fix=self.missing_fix(weight, tried),
        )

    def missing_fix(self, weight: Weight, tried: list[str]) -> str:
        if not tried:
            section = f"tensors.{weight.stack}" if weight.stack else "tensors"
            return f'add {weight.role} = "name" to [{"gguf." if self.gguf else ""}{section}]'
        close = did_you_mean(tried[0], self.source.tensors)
        return f"looked for {', '.join(dict.fromkeys(tried))}" + (f"; {close}" if close else "")

    def entries(self, weight: Weight) -> Iterator[tuple[Node, bool, tuple[int, int]]]:
        """(entry, whether its key names the slot, (part, parts)) for every alternative of the weight's role, in order; a
        role may stand in several keys."""
        table = self.tables.table(weight.stack) if weight.stack else self.tables
        listed = False
        for wanted in (f"{weight.role}.{weight.slot}", weight.role):
            for key, node in table.items():
                roles = [r.strip() for r in key.split(",")]
                if wanted not in roles or (isinstance(node, Table) and "from" not in node and not self.gguf):
                    continue
                exact = wanted != weight.role
                self.scope.touch(node.where)
                items = node.value if isinstance(node, Leaf) and isinstance(node.value, list) else [node]
                listed = True
                for item in items:
                    yield item, exact, (roles.index(wanted), len(roles))
        if self.gguf and not listed:
            yield Leaf(weight.role, Where("GGUF")), False, (0, 1)

    def find(
        self, entry: Node, exact: bool, part: tuple[int, int], weight: Weight, scope: ModelScope, tried: list[str]
    ) -> Plan | None:
        """The plan of one alternative, or None when its tensor is not there (or its ``if`` is false)."""
        transform = None
        if isinstance(entry, Table):
            if "if" in entry and not resolve_node(entry["if"], scope):
                return None
            transform = self.transform(entry, part, weight, scope)
            source_name = plain(entry.get("from")) or weight.role
        else:
            source_name = entry.value
        if not isinstance(source_name, str):
            raise SpecError(
                f"role '{weight.role}' needs a name", where=str(entry.where), fix='write role = "checkpoint.name"'
            )
        if part[1] > 1 and (transform is None or transform.split is None):
            fix = 'write { from = "name", axes = "part in", split = "part", sizes = [...] }'
            raise SpecError("several roles come from one tensor by a split", where=str(entry.where), fix=fix)
        return self.present(self.spellings(source_name, weight, exact), weight, transform, tried)

    def spellings(self, name: str, weight: Weight, exact: bool) -> list[str]:
        if self.gguf and weight.stack and "{i}" not in name:
            name = "blk.{i}." + name
        name = name.replace("{i}", str(weight.layer))
        if exact or weight.slot == "value":
            return [name, f"{name}.weight", f"{name}.bias"]
        return [f"{name}.bias"] if weight.slot == "bias" else [f"{name}.weight", name]

    def present(self, names: list[str], weight: Weight, transform: Transform | None, tried: list[str]) -> Plan | None:
        for name in names:
            for prefix in self.prefixes:
                full = prefix + name
                marker = "{e}" if "{e}" in full else "{h}" if "{h}" in full else ""
                first = full.replace(marker, "0") if marker else full
                tried.append(first)
                if first in self.source.tensors:
                    count = weight.sizes[0] if marker else 1
                    stacked = tuple(full.replace(marker, str(n)) for n in range(count)) if marker else (full,)
                    return Plan(weight, stacked, bool(marker), transform)
        return None

    def transform(self, entry: Table, part: tuple[int, int], weight: Weight, scope: ModelScope) -> Transform:
        axes = plain(entry.get("axes"))
        lhs, rhs = parse_axes(axes, entry["axes"].where) if isinstance(axes, str) else ((), ())
        known: dict[str, int] = {}
        names = {n for g in lhs for n in g}
        for key, node in entry.items():
            if key in names:
                known[key] = self.integer(node, scope)
            elif key not in ENTRY_KEYS:
                fix = (
                    did_you_mean(key, (*ENTRY_KEYS, *names))
                    or f"an entry has {', '.join(ENTRY_KEYS)} and sizes of its axes"
                )
                raise SpecError(f"'{weight.role}' has an unknown key '{key}'", where=str(node.where), fix=fix)
        split = plain(entry.get("split"))
        sizes: tuple[int, ...] = ()
        if split is not None:
            listed = entry.get("sizes")
            items = listed.value if isinstance(listed, Leaf) and isinstance(listed.value, list) else []
            sizes = tuple(self.integer(item, scope) for item in items)
            if split not in names or len(sizes) < part[1]:
                fix = f"split names one of {', '.join(sorted(names))}, sizes has one entry a role"
                raise SpecError(f"'{weight.role}': the split does not fit", where=str(entry.where), fix=fix)
        value = plain(entry.get("value"))
        return Transform(lhs, rhs, split, sizes, part[0], known, value, entry.where)

    def integer(self, node: Node, scope: ModelScope) -> int:
        value = resolve_node(node, scope)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise SpecError(f"a size is a whole number, it is {value!r}", where=str(node.where), fix="check the config")
        return value

    def fused(self, weight: Weight) -> Plan | None:
        """A GGUF file's fused tensor in place of the parts the graph asks for."""
        for name, roles in FUSED.items():
            if weight.role not in roles:
                continue
            plan = self.present(self.spellings(name, weight, False), weight, None, [])
            parts = [self.weights.get(weight.key.replace(weight.role, role, 1)) for role in roles]
            if plan is None or any(p is None for p in parts):
                continue
            axis = 1 if weight.slot == "weight" and len(weight.sizes) == 3 else 0
            sizes = tuple(p.sizes[axis] for p in parts if p is not None)
            names = ("e", "part", "in") if axis else ("part", "in")
            groups = tuple((n,) for n in names[: len(weight.sizes)])
            made = Transform(groups, groups, "part", sizes, roles.index(weight.role), {}, None, Where("GGUF"))
            return Plan(weight, plan.names, False, made)
        return None

    # ------------------------------------------------------------------ proofs

    def checked(self, plan: Plan) -> Plan:
        """`plan`, once the shape it gives is the one the graph wants."""
        weight, transform = plan.weight, plan.transform
        infos: list[TensorInfo] = []
        for name in plan.names:
            if name not in self.source.tensors:
                fix = f"the graph has {len(plan.names)} of them; check the number of experts or heads in the config"
                raise CheckpointError(f"'{name}' is not in the file", where=str(self.source.path), fix=fix)
            infos.append(self.source.tensors[name])
        stored = infos[0].shape
        if any(info.shape != stored for info in infos):
            raise CheckpointError(f"'{plan.names[0]}' and its like differ in shape", where=str(self.source.path))
        if transform is not None and transform.lhs:
            if weight.slot == "bias" and len(transform.lhs) == len(stored) + 1:
                transform = transform.drop_trailing()
            try:
                shape = transform.shape(stored)
            except SpecError as error:
                error.reason = f"'{weight.key}' from '{plan.names[0]}': {error.reason}"
                raise
        else:
            shape = stored
        shape = (len(plan.names), *shape) if plan.stacked else shape
        if [n for n in shape if n != 1] != [n for n in weight.sizes if n != 1]:
            wanted = ", ".join(str(axis) for axis in weight.shape)
            raise CheckpointError(
                f"'{weight.key}' must be [{wanted}]; '{plan.names[0]}' gives {list(shape)} (stored {list(stored)})",
                where=str(self.source.path),
                fix="the config and the weights disagree, or the spec's axes are wrong",
            )
        return Plan(weight, plan.names, plan.stacked, transform)

    def unused(self, used: set[str]) -> tuple[list[str], list[str]]:
        """(problems, warnings) about tensors that no weight reads."""
        ignore = [*(self.spec.value("tensors", "ignore") or []), *(self.spec.value("gguf", "ignore") or [])]
        tied = {p for p in self.source.tensors if re.search(r"(^|\.)(lm_head|embed_out|output)\.weight$", p)}
        layers = self.graph.layers
        problems, warnings = [], []
        for name in self.source.tensors:
            if name in used or JUNK.search(name) or any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore):
                continue
            number = re.search(r"\.(\d+)\.", name)
            if number and int(number[1]) >= layers and ("layers" in name or "blk" in name or ".h." in name):
                warnings.append(f"'{name}' belongs to layer {number[1]}; the config has {layers} layers: ignored")
            elif name in tied:
                warnings.append(f"'{name}' is ignored: the config ties the output to the token embedding")
            else:
                problems.append(
                    f"tensor '{name}' {list(self.source.tensors[name].shape)} is used by no part of the spec"
                )
        return problems, warnings
