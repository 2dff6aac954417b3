"""From a graph's weights to a checkpoint's tensors: every weight gets exactly one, every tensor is used or known junk.

`plan_weights` resolves names and proves shapes from the headers; nothing is read before all of that holds. What it gives,
`Weights`, then reads, dequantises and transforms one weight when it is first asked for.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError, InferflowError, SpecError, did_you_mean
from ..graph.absent import absent_keys, explain
from ..graph.graph import Graph, Weight
from ..graph.scope import ModelScope, resolve_node
from ..spec.document import Leaf, Node, Table, Where
from ..spec.expression import show
from ..spec.library import Spec, plain
from .advice import Advisor, MissingTensorError, role_keys, users
from .choice import KEEP, Choice, assign
from .gguf_keep import KEPT
from .problems import Failed, combined, told_once
from .quantised import QuantisedSource
from .reader import Plan, Weights
from .source import Source, TensorInfo
from .transform import Transform, map_values, parse_axes
from .widen import ITEM_BYTES

__all__ = ["Plan", "Weights", "plan_weights"]

ENTRY_KEYS = ("from", "axes", "split", "sizes", "value", "if")
# Tensors that checkpoints carry and no forward pass reads.
JUNK = re.compile(
    r"(rotary_emb\.inv_freq|\.attn(ention)?\.(masked_)?bias|position_ids|num_batches_tracked|rotary_pos_emb\.inv_freq)$"
)
LAYER = re.compile(r"((?:.*?\.)??)(\d+)\.")  # what stands before the first number of a name, and the number
# GGUF converters may keep these fused; the parts follow one another along the output axis.
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}


def plan_weights(
    graph: Graph, spec: Spec, config: Mapping[str, Any], source: Source, choice: Choice | None = None
) -> Weights:
    """Resolve every weight of `graph` in `source`; `choice` says in which formats (None: the file's). Raises
    CheckpointError (missing, misshapen or unused tensors: all of them are listed), SpecError (a bad entry) or ArgumentError
    (a choice that does not go with the model)."""
    planner = _Planner(graph, spec, config, source)
    plans, failed = planner.all()
    for _, error in failed:
        if not isinstance(error, CheckpointError):
            raise error
    problems, warnings = planner.problems(plans, failed)
    if problems:
        raise combined(problems, source)
    weights = Weights(source, plans, planner.scope)
    weights.formats, weights.fallbacks = assign(choice or Choice(), graph, weights.ident)
    kept = [key for key, format_ in weights.formats.items() if format_ == KEEP]
    weights.warnings = [*warnings, *widened(plans, kept, source)]
    return weights


def widened(plans: Mapping[str, Plan], keys: Iterable[str], source: Source) -> Iterator[str]:
    """A warning for each type of blocks that has no form of its own here."""
    if source.format != "gguf":
        return
    names = dict.fromkeys(name for key in keys for name in plans[key].names)
    kinds = Counter(source.tensors[name].dtype for name in names)
    for kind, count in kinds.items():
        if kind not in KEPT and kind not in ITEM_BYTES:
            yield f"{count} tensors of type {kind} are widened to 16 or 32 bits in memory: quantise the model to save it"


def weight_problems(
    graph: Graph, spec: Spec, config: Mapping[str, Any], source: Source, read: set[Where]
) -> list[InferflowError]:
    """Every problem on its own, for the linter; `read` receives the places of all entries and names that were used."""
    planner = _Planner(graph, spec, config, source)
    plans, failed = planner.all()
    read |= planner.scope.read
    return planner.problems(plans, failed)[0]


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
        self.looked_at: set[str] = set()  # by weights that failed all the same
        self.last: tuple[Transform | None, int] = (None, 0)  # the last layout tried, and of how many tensors
        self.keys_of: dict[str, list[tuple[str, list[str], Node]]] = {}
        self.rank = {file: n for n, file in enumerate(spec.files)}
        where = spec.tree.table("tensors").where
        self.place = str(where if where.file == spec.files[0] else spec.tree.where)

    def all(self) -> tuple[dict[str, Plan], list[Failed]]:
        """The plans by key, and the weights that have none, with why."""
        plans: dict[str, Plan] = {}
        failed: list[Failed] = []
        for key, weight in self.weights.items():
            try:
                plans[key] = self.plan(weight)
            except InferflowError as error:
                if isinstance(error, SpecError):
                    explain(error, self.scope, self.scope.config)
                failed.append((weight, error))
        return plans, failed

    # ------------------------------------------------------------------ one weight

    def plan(self, weight: Weight) -> Plan:
        """The plan of one weight, its shape proved."""
        if isinstance(self.source, QuantisedSource):
            return self.by_key(weight, self.source)
        tried: list[str] = []
        scope = self.scope.at(weight.layer if weight.layer >= 0 else None)
        place = weight.where
        for entry, exact, part in self.entries(weight):
            place = entry.where if entry.where.file == self.spec.files[0] else place
            found = self.find(entry, exact, part, weight, scope, tried)
            if found is not None:
                return self.checked(found, place)
        if self.gguf and (fused := self.fused(weight)) is not None:
            return self.checked(fused, place)
        raise self.missing(weight, tried, place)

    def by_key(self, weight: Weight, source: QuantisedSource) -> Plan:
        """Of a quantised directory, whose tensors are the graph's weights."""
        name = source.aliases.get(weight.key, weight.key)
        if name not in source.tensors:
            fix = f"{source.spec_path.name} and the weights are not of one model: quantise it again"
            raise CheckpointError(f"'{weight.key}' has no tensor in {source.path}", where=str(source.path), fix=fix)
        dtype = source.tensors[name].dtype
        if name not in source.packed and dtype not in ("F32", "F16", "BF16"):
            reason = f"'{name}' is {dtype}, and can be F32, F16 or BF16"
            raise CheckpointError(reason, where=str(source.path), fix="quantise the model again")
        return self.checked(Plan(weight, (name,), False, None), weight.where)

    def missing(self, weight: Weight, tried: list[str], place: Where) -> MissingTensorError:
        transform, count = self.last if tried else (None, 0)

        def fits(shape: tuple[int, ...]) -> bool:
            try:
                return same_sizes(stored_as(weight, transform, shape, count)[1], weight.sizes)
            except SpecError:
                return False

        reason = f"'{weight.key}' has no tensor in {self.source.path}"
        return MissingTensorError(reason, str(place), tried, fits)

    def problems(self, plans: Mapping[str, Plan], failed: list[Failed]) -> tuple[list[InferflowError], list[str]]:
        """(what is wrong with all of it, warnings)."""
        used = users((plan.weight, plan.names) for plan in plans.values())
        unused, warnings = self.unused(used, self.looked_at)
        if not failed and not unused:
            return [], warnings
        advisor = Advisor(self.spec, self.source, self.tables, self.prefixes, self.weights, used)
        return told_once(failed, unused, self.source, self.place, advisor), warnings

    def entries(self, weight: Weight) -> Iterator[tuple[Node, bool, tuple[int, int]]]:
        """(entry, whether its key names the slot, (part, parts)) for every alternative of the weight's role, in order; a
        role may stand in several keys: those of the newest file go first, and among its keys those that name the slot."""
        table = self.tables.table(weight.stack) if weight.stack else self.tables
        exact = f"{weight.role}.{weight.slot}"
        found = [
            (self.rank.get(node.where.file, len(self.rank)), word != exact, node, (roles.index(word), len(roles)))
            for word in (exact, weight.role)
            for _, roles, node in self.keys(weight.stack, table)
            if word in roles
        ]
        for _, plain_role, node, part in sorted(found, key=lambda item: item[:2]):
            self.scope.touch(node.where)
            for item in node.value if isinstance(node, Leaf) and isinstance(node.value, list) else [node]:
                yield item, not plain_role, part
        if self.gguf and not found:
            yield Leaf(weight.role, Where("GGUF")), False, (0, 1)

    def keys(self, stack: str, table: Table) -> list[tuple[str, list[str], Node]]:
        if stack not in self.keys_of:
            self.keys_of[stack] = list(role_keys(table, self.gguf))
        return self.keys_of[stack]

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
                count = min(weight.sizes[0], len(self.source.tensors) + 1) if marker else 1  # one too many is missed
                self.last = transform, count if marker else 0
                if first in self.source.tensors:
                    stacked = tuple(full.replace(marker, str(n)) for n in range(count)) if marker else (full,)
                    return Plan(weight, stacked, bool(marker), transform)
        return None

    def transform(self, entry: Table, part: tuple[int, int], weight: Weight, scope: ModelScope) -> Transform:
        axes, value = self.text(entry, "axes"), self.text(entry, "value")
        lhs, rhs = parse_axes(axes, entry["axes"].where) if axes is not None else ((), ())
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
        place = entry["value"].where if value is not None else entry.where
        if value is not None:  # tried now on a small tensor, so that it cannot fail when the weight is read
            map_values(value, np.ones((2,) * len(weight.sizes), np.float32), scope, place)
        return Transform(lhs, rhs, split, sizes, part[0], known, value, entry.where, place)

    def text(self, entry: Table, key: str) -> str | None:
        node = entry.get(key)
        if node is None:
            return None
        if not isinstance(node, Leaf) or not isinstance(node.value, str):
            what = 'e.g. axes = "in out -> out in"' if key == "axes" else 'an expression in w: value = "w + 1"'
            raise SpecError(f"'{key}' is a string", where=str(node.where), fix=what)
        return node.value

    def integer(self, node: Node, scope: ModelScope) -> int:
        value = resolve_node(node, scope)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            why, fix = absent_keys(node, scope, self.scope.config, "int") if value is None else ("", "")
            reason = f"a size is a positive whole number, it is {show(value)}" + (f": {why}" if why else "")
            raise SpecError(reason, where=str(node.where), fix=fix or "check the config")
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
            at = Where("GGUF")
            made = Transform(groups, groups, "part", sizes, roles.index(weight.role), {}, None, at, at)
            return Plan(weight, plan.names, False, made)
        return None

    # ------------------------------------------------------------------ proofs

    def checked(self, plan: Plan, place: Where) -> Plan:
        """`plan`, once the shape it gives is the one the graph wants; else an error at `place`."""
        self.looked_at.update(plan.names)
        weight, transform = plan.weight, plan.transform
        infos: list[TensorInfo] = []
        for name in plan.names:
            if name not in self.source.tensors:
                fix = f"the graph has {len(plan.names)} of them; check the number of experts or heads in the config"
                raise CheckpointError(f"'{name}' is not in {self.source.path}", where=str(place), fix=fix)
            infos.append(self.source.tensors[name])
        stored = infos[0].shape
        if any(info.shape != stored for info in infos):
            reason = f"'{plan.names[0]}' and its like differ in shape"
            raise CheckpointError(reason, where=str(place), fix="the file is damaged, or they are not alike")
        try:
            transform, shape = stored_as(weight, transform, stored, len(plan.names) if plan.stacked else 0)
        except SpecError as error:
            error.reason = f"'{weight.key}' from '{plan.names[0]}': {error.reason}"
            raise
        if not same_sizes(shape, weight.sizes):
            wanted = ", ".join(str(axis) for axis in weight.shape)
            raise CheckpointError(
                f"'{weight.key}' must be [{wanted}]; '{plan.names[0]}' gives {list(shape)} (stored {list(stored)})",
                where=str(place),
                fix="the config and the weights disagree, or the spec's axes are wrong",
            )
        return Plan(weight, plan.names, plan.stacked, transform)

    def unused(self, used: Mapping[str, list[Weight]], looked_at: set[str]) -> tuple[list[str], list[str]]:
        """(names that are nobody's, warnings about others) of the tensors that no weight reads."""
        ignore = [*(self.spec.value("tensors", "ignore") or []), *(self.spec.value("gguf", "ignore") or [])]
        tied = {p for p in self.source.tensors if re.search(r"(^|\.)(lm_head|embed_out|output)\.weight$", p)}
        counts = layer_counts(used)
        problems: list[str] = []
        warnings: list[str] = []
        beyond: dict[str, int] = {}
        for name in self.source.tensors:
            if name in used or name in looked_at or JUNK.search(name):
                continue
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore):
                continue
            numbered = LAYER.match(name)
            if numbered and len(numbered[2]) < 9 and int(numbered[2]) >= counts.get(numbered[1], 1 << 30):
                beyond[numbered[1]] = beyond.get(numbered[1], 0) + 1
            elif name in tied:
                warnings.append(f"'{name}' is ignored: the config ties the output to the token embedding")
            else:
                problems.append(name)
        for head, number in beyond.items():
            first = counts[head]
            warnings.append(f"left out: {number} tensor{'s' * (number > 1)} of layers >= {first} ('{head}{first}' …)")
        return problems, warnings


def layer_counts(used: Mapping[str, list[Weight]]) -> dict[str, int]:
    """What stands before the layer's number in the names that a stack reads, and how many layers it has."""
    out: dict[str, int] = {}
    for name, weights in used.items():
        numbered = LAYER.match(name)
        if numbered and any(str(weight.layer) == numbered[2] for weight in weights):
            out[numbered[1]] = max(out.get(numbered[1], 0), int(numbered[2]) + 1)
    return out


def stored_as(
    weight: Weight, transform: Transform | None, stored: tuple[int, ...], stacked: int
) -> tuple[Transform | None, tuple[int, ...]]:
    """(the transform as it applies, the shape it gives) for a tensor, or `stacked` tensors, of shape `stored`."""
    shape = stored
    if transform is not None and transform.lhs:
        if weight.slot == "bias" and len(transform.lhs) == len(stored) + 1:
            transform = transform.drop_trailing()
        shape = transform.shape(stored)
    return transform, (stacked, *shape) if stacked else shape


def same_sizes(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Axes of one element apart."""
    return [n for n in one if n != 1] == [n for n in other if n != 1]
