"""Which format each matrix is to have: ``q3.5``, ``q3.5,output=q4,layers.0.*=q8``, a TOML table of the same, or ``keep``.

A rule is a pattern (of `fnmatch`) and a format. The pattern is compared with a weight's role (``attn_v``) and its key, with and
without the slot (``layers.0.attn_v``); of several rules that fit the last one counts. A format for everything brings along a
mix of our own for the output and the token embedding, which rules override. What cannot take its format keeps the file's, and
is listed as a `Fallback`.
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quant.formats import ALIASES, FORMATS, GROUP, TILE

from ..errors import ArgumentError, SpecError, did_you_mean, one_line
from ..graph.graph import Graph, Node, Weight
from ..spec.document import parse_toml
from ..spec.expression import show
from ..spec.library import plain

__all__ = ["KEEP", "Choice", "Fallback", "assign", "is_low_bit", "matrices", "parse_choice"]

KEEP = "keep"  # the format that says: as the file has it
SMALLEST = 4096  # elements; below it scales and padding eat up what the codes save
MAX_RULES = 1000
# A step up or down where a megabyte counts more or less than elsewhere. The logits come right out of `output`, which often is
# the token embedding too. For the others, thousandths of a nat of KL divergence that a megabyte more saves in a model of 135 M
# weights, one role at a time, calibrated: attn_v 13, attn_k 4.5, ffn_down 3.1, ffn_up 2.8, attn_output 2.3, ffn_gate 1.8,
# attn_q 1.1.
_MIX: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "q3": (("output", "q4"), ("token_embd", "q3.5"), ("attn_v", "q4"), ("attn_k", "q3.5")),
        "q3.5": (("output", "q4"), ("attn_v", "q4"), ("attn_k", "q4"), ("attn_q", "q3")),
    }
)
_ASCENDING = ("q3", "q3.5", "q4", "q8", KEEP, "bf16", "f16", "f32")


@dataclass(frozen=True)
class Choice:
    """`default` is the format of all that no rule names; `rules` are the user's (pattern, format), the last one first in
    rank."""

    default: str = KEEP
    rules: tuple[tuple[str, str], ...] = ()

    def wanted(self, weight: Weight) -> str:
        """The format asked for."""
        names = _names(weight)
        for pattern, format_ in reversed((*_MIX.get(self.default, ()), *self.rules)):
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                return format_
        return self.default

    @property
    def keeps_all(self) -> bool:
        return all(format_ == KEEP for format_ in (self.default, *(f for _, f in self.rules)))

    def __str__(self) -> str:
        return ",".join([self.default, *(f"{pattern}={format_}" for pattern, format_ in self.rules)])


@dataclass(frozen=True)
class Fallback:
    """A matrix that does not have the format it was to have."""

    key: str
    wanted: str
    got: str
    why: str

    def __str__(self) -> str:
        return f"{self.key} is {self.got}, not {self.wanted}: {self.why}"


def is_low_bit(format_: str) -> bool:
    """Whether `quant` packs it."""
    return format_ in FORMATS and FORMATS[format_].kind != "float"


# ------------------------------------------------------------------------------------------------ reading a choice


def parse_choice(given: str | os.PathLike[str] | Mapping[str, Any] | Choice | None) -> Choice:
    """A choice from ``"q3.5,output=q4"``, from a ``.toml`` file or a mapping (``{"default": "q3.5", "output": "q4"}``);
    None keeps everything. ArgumentError for what is no format."""
    if isinstance(given, Choice):
        return given
    if given is None:
        return Choice()
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.strip().endswith(".toml")):
        given = _read(Path(os.fspath(given)))
    if isinstance(given, str):
        pairs = [_pair(item) for item in given.split(",")]
    elif isinstance(given, Mapping):
        pairs = [(str(pattern), format_) for pattern, format_ in given.items()]
    else:
        fix = 'pass "q3.5", "q3.5,output=q4", or {"default": "q3.5", "output": "q4"}'
        raise ArgumentError(f"it is {show(given)}", where="quant", fix=fix)
    if len(pairs) > MAX_RULES:
        raise ArgumentError(f"it has {len(pairs)} rules", where="quant", fix=f"give at most {MAX_RULES}")
    defaults = [format_ for pattern, format_ in pairs if pattern == "default"]
    if len(defaults) > 1 and "" in defaults:
        raise ArgumentError(
            "there is nothing before or after a comma", where="quant", fix='write it like "q3.5,output=q4"'
        )
    if len(defaults) > 1:
        reason = f"it has several formats for everything: {one_line(', '.join(map(str, defaults)), 200)}"
        raise ArgumentError(reason, where="quant", fix="give one, then ROLE=FORMAT for the others")
    rules = [(pattern, _format(format_)) for pattern, format_ in pairs if pattern != "default"]
    return Choice(_format(defaults[0]) if defaults else KEEP, tuple(rules))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        table = plain(parse_toml(path.read_text("utf-8"), str(path)))
    except (OSError, UnicodeDecodeError, SpecError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
        raise ArgumentError(
            f"cannot be read: {reason}", where=str(path), fix='it holds lines like output = "q4"'
        ) from None
    assert isinstance(table, Mapping)
    return table


def _pair(item: str) -> tuple[str, str]:
    pattern, equals, format_ = item.partition("=")
    return (pattern.strip(), format_.strip()) if equals else ("default", pattern.strip())


def _format(name: Any) -> str:
    known = [KEEP, *FORMATS]
    word = ALIASES.get(name, name) if isinstance(name, str) else name
    if word not in known:
        fix = did_you_mean(str(word), known) or f"there are {', '.join(known)}"
        said = f"'{one_line(name, 40)}'" if isinstance(name, str) else show(name)
        raise ArgumentError(f"{said} is no format", where="quant", fix=fix)
    return str(word)


# ------------------------------------------------------------------------------------------------ giving formats


def matrices(graph: Graph) -> dict[str, Weight]:
    """The weights that engines take as matrices, those of linears and embeddings, by key."""
    nodes = (node for node in graph.nodes if node.op in ("linear", "embed"))
    return {w.key: w for node in nodes for w in node.weights if w.slot == "weight"}


def assign(choice: Choice, graph: Graph, same: Callable[[str], object]) -> tuple[dict[str, str], list[Fallback]]:
    """(the format of each matrix of `graph`, what fell back). Keys that are `same` share one tensor, which gets the highest
    format of them. ArgumentError for a rule that names no weight."""
    weights = matrices(graph)
    _check_rules(choice, weights.values())
    exempt = _exempt(graph)
    formats: dict[str, str] = {}
    fallbacks: list[Fallback] = []
    for key, weight in weights.items():
        wanted = choice.wanted(weight)
        why = exempt.get(key) or _too_small(weight)
        formats[key] = wanted
        if is_low_bit(wanted) and why:
            formats[key] = KEEP
            fallbacks.append(Fallback(key, wanted, KEEP, why))
    shared: dict[object, list[str]] = {}
    for key in formats:
        shared.setdefault(same(key), []).append(key)
    for keys in shared.values():
        best = max((formats[key] for key in keys), key=_ASCENDING.index)
        formats.update(dict.fromkeys(keys, best))
    return formats, fallbacks


def _names(weight: Weight) -> tuple[str, str, str]:
    return weight.role, weight.key, weight.key.removesuffix(f".{weight.slot}")


def _check_rules(choice: Choice, weights: Iterable[Weight]) -> None:
    names = {name for weight in weights for name in _names(weight)}
    roles = sorted({weight.role for weight in weights})
    for pattern, _ in choice.rules:
        if not fnmatch.filter(names, pattern):
            fix = did_you_mean(pattern, roles) or f"the roles are {', '.join(roles)}"
            raise ArgumentError(f"'{one_line(pattern, 60)}' names no matrix of this model", where="quant", fix=fix)


def _too_small(weight: Weight) -> str:
    elements = math.prod(weight.sizes)
    if elements < SMALLEST:
        return f"it has only {elements} elements"
    rows, cols = weight.sizes[-2:]
    return f"it is only {rows} × {cols}" if rows < TILE or cols < GROUP else ""


def _exempt(graph: Graph) -> dict[str, str]:
    """Matrices that low precision harms out of proportion, and why: tables of positions, and what chooses experts."""
    out: dict[str, str] = {}
    maker = {value: node for node in graph.nodes for value in node.outputs}
    for node in graph.nodes:
        if node.op == "embed" and node.inputs[0] != graph.inputs["tokens"]:
            out.update((w.key, "it is a table of positions") for w in node.weights)
        if node.op == "router":
            linear = _linear_before(node, maker)
            out.update((w.key, "it chooses the experts") for w in (linear.weights if linear else ()))
    return out


def _linear_before(node: Node, maker: Mapping[int, Node]) -> Node | None:
    """The linear that a router's logits come from, through what works on them one by one."""
    found = maker.get(node.inputs[0])
    while found is not None and found.op != "linear":
        found = maker.get(found.inputs[0]) if found.op in ("act", "binary", "clamp", "softcap", "reduce") else None
    return found
