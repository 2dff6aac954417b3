"""What to do about a tensor that nothing reads and a weight that has none: the parameter that asks, or does not ask, for it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import CheckpointError, did_you_mean
from ..graph.graph import Weight
from ..spec.document import Leaf, Node, Table
from ..spec.expression import show
from ..spec.library import Spec, plain
from .asked import Asked, asked_by_role, written
from .source import Source

__all__ = ["Advisor", "MissingTensorError", "item_names", "pattern", "role_keys", "users"]

MAX_CANDIDATES = 5000
MAX_LOOKED_FOR = 4


class MissingTensorError(CheckpointError):
    """A weight has no tensor. `tried` are the names looked for, none when the role has no entry; `fits` says whether a
    tensor of some shape could stand in; `close` is the name of one that may be meant, or empty."""

    def __init__(self, reason: str, where: str, tried: Sequence[str], fits: Callable[[tuple[int, ...]], bool]) -> None:
        super().__init__(reason, where=where, fix="map it in [tensors]")
        self.tried = tried
        self.fits = fits
        self.close = ""


def pattern(name: str) -> str:
    """A tensor's name without the numbers that count layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name)


def role_keys(table: Table, gguf: bool) -> Iterator[tuple[str, list[str], Node]]:
    """(key, roles, entry) of one table of `[tensors]`, without those of its stacks."""
    for key, node in table.items():
        if key != "ignore" and not (isinstance(node, Table) and "from" not in node and not gguf):
            yield key, [role.strip() for role in key.split(",")], node


def item_names(node: Node) -> Iterator[str]:
    """The checkpoint's names in one entry."""
    items = node.value if isinstance(node, Leaf) and isinstance(node.value, list) else [node]
    for item in items:
        name = plain(item.get("from")) if isinstance(item, Table) else plain(item)
        if isinstance(name, str):
            yield name


@dataclass(frozen=True)
class _Mapped:
    """One name of an entry, as a regular expression over tensors."""

    name: re.Pattern[str]
    stack: str
    roles: tuple[str, ...]


class Advisor:
    """Knows the spec's text, the graph's weights and which tensor each reads."""

    def __init__(
        self, spec: Spec, source: Source, tables: Table, prefixes: Sequence[str], weights: Mapping[str, Weight],
        used: Mapping[str, Sequence[Weight]],
    ) -> None:  # fmt: skip
        self.spec = spec
        self.source = source
        self.gguf = source.format == "gguf"
        self.tables = tables
        self.prefixes = prefixes
        self.weights = weights
        self.used = used
        self.section = "gguf.tensors" if self.gguf else "tensors"
        self.read_from = {weight.key: name for name, users in used.items() for weight in users}

    @cached_property
    def asked(self) -> dict[tuple[str, str], list[Asked]]:
        return asked_by_role(self.spec)

    @cached_property
    def there(self) -> set[tuple[str, str, int]]:
        return {(w.stack, w.role, w.layer) for w in self.weights.values()}

    # ------------------------------------------------------------------ a tensor that nothing reads

    def unused(self, name: str) -> str:
        """What to do about tensor `name`. A pattern to ignore is offered last, and never for the bias of a used weight."""
        users = self.used.get(f"{name[:-5]}.weight", ()) if name.endswith(".bias") else ()
        users = [w for w in users if f"{w.key.rpartition('.')[0]}.bias" not in self.weights]
        if users:
            return self.unasked_bias({w.role: w for w in users})
        ignore = f'{"gguf" if self.gguf else "tensors"}.ignore = ["{pattern(name).replace("{i}", "*")}"]'
        mapped = self.mapped(name)
        if mapped is None:
            return f"map it in [{self.section}], or write {ignore}"
        return f"{self.unasked(*mapped)}; or write {ignore}"

    def unasked_bias(self, users: Mapping[str, Weight]) -> str:
        """The parameters that give these roles a bias: one for all, if there is one."""
        found = [(role, asked) for role, w in users.items() for asked in self.asked.get((w.stack, role), [])[:1]]
        takes = [asked for _, asked in found if asked.bias]
        if not takes:
            role = next(iter(users))
            owner = found[0][1].owner if found else f"'{role}'"
            return f"{owner} has no parameter for a bias of '{role}': write a block of your own"
        first = takes[0]
        if first.primitive == "norm":
            inside = f"{first.inside} of " if first.inside else ""
            return f"set bias = true in {inside}{first.owner}, or in [norm] for all norms"
        if len(takes) == 1:
            names = list(first.bias)
            more = f" (or {' or '.join(names[1:])})" if len(names) > 1 else ""
            return f"set {names[0]}{more} of {first.owner}"
        common = [n for n in first.bias if all(n in asked.bias for asked in takes)]
        return f"set {common[0] if common else ', '.join(dict.fromkeys(a.bias[0] for a in takes))} of {first.owner}"

    def mapped(self, name: str) -> tuple[str, str, int] | None:
        """(stack, role, layer) of the entry that maps tensor `name`, one that no part asks for if there are several."""
        found: list[tuple[str, str, int]] = []
        for entry in self.entries:
            match = entry.name.fullmatch(name)
            if match is not None:
                layer = int(match["i"]) if entry.stack and "i" in match.groupdict() and len(match["i"]) < 9 else -1
                found.extend((entry.stack, role, layer) for role in entry.roles)
        found.sort(key=lambda item: item in self.there)
        return found[0] if found else None

    @cached_property
    def entries(self) -> list[_Mapped]:
        if self.gguf:
            return self.gguf_entries()
        out = []
        stacks = [(key, t) for key, t in self.tables.items() if isinstance(t, Table) and "from" not in t]
        before = "|".join(re.escape(prefix) for prefix in self.prefixes)
        for stack, table in [("", self.tables), *stacks]:
            for _, roles, node in role_keys(table, self.gguf):
                names = tuple(role.removesuffix(".weight").removesuffix(".bias") for role in roles)
                for text in item_names(node):
                    core = re.escape(text)
                    for marker, number in (("i", r"(?P<i>\d+)"), ("e", r"\d+"), ("h", r"\d+")):
                        core = core.replace(re.escape(f"{{{marker}}}"), number, 1)
                    out.append(_Mapped(re.compile(rf"(?:{before}){core}(?:\.weight|\.bias)?"), stack, names))
        return out

    def gguf_entries(self) -> list[_Mapped]:
        """In a GGUF file the role is the name."""
        out = []
        for stack, role in self.asked:
            before = r"blk\.(?P<i>\d+)\." if stack else ""
            out.append(_Mapped(re.compile(rf"{before}{re.escape(role)}(?:\.weight|\.bias)?"), stack, (role,)))
        return out

    def unasked(self, stack: str, role: str, layer: int) -> str:
        """Why no part asks for a role that is mapped, as a question."""
        key = f"{stack}.{layer}.{role}." if stack else f"{role}."
        other = next((name for full, name in self.read_from.items() if full.startswith(key)), None)
        if other is not None:
            return f"'{role}' maps it, but reads '{other}'"
        some = any(s == stack and r == role for s, r, _ in self.there)
        here = f" in layer {layer}" if some and layer >= 0 else ""
        head = f"'{role}' maps this tensor, but no part asks for it{here}: "
        found = self.asked.get((stack, role), [])
        guarded = [asked for asked in found if asked.guards]
        if guarded:
            first = guarded[0]
            given = written(first, first.guards, self.spec)
            if given is None:
                return f"{head}is {first.guards[0]} of {first.owner} to be set?"
            return f"{head}is {self.question(first, first.guards)} right?"
        if found:
            condition = found[0].table.get("if")
            if condition is not None:
                return f"{head}is the 'if' of '{found[0].part}' right ({condition.where})?"
            if found[0].block == found[0].primitive or not some:
                return f"{head}is '{found[0].part}' called by the flow{f' of [{stack}]' if stack else ''}?"
            return f"{head}is the config right?"
        close = did_you_mean(role, [r for s, r in self.asked if s == stack])
        return f"{head}no part has that role{f' ({close})' if close else ''}"

    # ------------------------------------------------------------------ a weight without a tensor

    def missing(self, weight: Weight, error: MissingTensorError, unused: Sequence[str]) -> str:
        """What to do about it; `error.close` is set when one of the tensors that nothing reads may be meant."""
        found = self.asked.get((weight.stack, weight.role), [])
        asked = next((a for a in found if a.guards), found[0] if found else None)
        base = weight.key.rpartition(".")[0]
        if weight.slot == "bias" and asked is not None and asked.bias and f"{base}.weight" in self.read_from:
            return self.asked_bias(asked)
        out = []
        if error.tried:
            error.close = self.like(error, unused)
            names = list(dict.fromkeys(error.tried))
            more = f" and {len(names) - MAX_LOOKED_FOR} more" if len(names) > MAX_LOOKED_FOR else ""
            close = f"; did you mean '{error.close}'?" if error.close else ""
            out.append(f"looked for {', '.join(names[:MAX_LOOKED_FOR])}{more}{close}")
        else:
            section = f"{self.section}.{weight.stack}" if weight.stack else self.section
            out.append(f'add {weight.role} = "name" to [{section}]')
        if not error.close and asked is not None:
            if asked.guards:
                out.append(f"is {self.question(asked, asked.guards)} right?")
            if asked.primitive == "norm" and weight.slot == "weight":
                place = f"{asked.inside} of '{asked.part}'" if asked.inside else f"'{asked.part}'"
                out.append(f"a norm without one has weight = false, in {place}")
            if weight.slot == "bias" and asked.bias:
                out.append(f"is {self.question(asked, asked.bias)} right?")
        return "; ".join(out)

    def asked_bias(self, asked: Asked) -> str:
        place = asked.owner
        if asked.primitive == "norm":
            place = f"{asked.inside} of {asked.owner}" if asked.inside else asked.owner
        return f"is {self.question(asked, asked.bias)} right? else set {asked.bias[0]} = false in {place}"

    def question(self, asked: Asked, names: tuple[str, ...]) -> str:
        """``'o_bias' of 'attn' (attention), true at FILE:LINE:COLUMN,``."""
        given = written(asked, names, self.spec)
        name, node = given if given is not None else (names[-1], None)
        default = asked_default(self.spec, asked, name)
        if node is None:
            return f"{name} of {asked.owner}{f', by default {default},' if default else ''}"
        return f"{name} of {asked.owner}, {_shown(node)} at {node.where},"

    def like(self, error: MissingTensorError, unused: Sequence[str]) -> str:
        """The unused tensor with the nearest name whose shape would do, or empty."""
        candidates: dict[str, str] = {}
        for name in unused:
            if len(candidates) < MAX_CANDIDATES and error.fits(self.source.tensors[name].shape):
                candidates.setdefault(pattern(name), name)
        close = difflib.get_close_matches(pattern(error.tried[0]), list(candidates), n=1)
        return candidates[close[0]] if close else ""


def asked_default(spec: Spec, asked: Asked, name: str) -> str:
    block = spec.blocks.get(asked.block)
    text = plain(block.table("params").get(name)) if isinstance(block, Table) else None
    default = text.partition("=")[2].strip() if isinstance(text, str) else ""
    return {"True": "true", "False": "false"}.get(default, default)


def _shown(node: Node) -> str:
    if isinstance(node, Table):
        return "a table"
    if isinstance(node.value, bool):
        return str(node.value).lower()
    return f'"{node.value[:60]}"' if isinstance(node.value, str) else show(plain(node))


def users(plans: Iterable[tuple[Weight, Sequence[str]]]) -> dict[str, list[Weight]]:
    """The weights that read each tensor."""
    out: dict[str, list[Weight]] = {}
    for weight, names in plans:
        for name in names:
            out.setdefault(name, []).append(weight)
    return out
