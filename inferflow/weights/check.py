"""The linter: everything that is wrong between one spec and one checkpoint, each with its place and its remedy.

First the text (every expression, flow and layout is parsed), then the graph (built for the checkpoint's config), then the
tensors (missing, misshapen, unused), then what the user's own file says that nothing reads.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import InferflowError, SpecError, did_you_mean
from ..graph.build import build_graph
from ..graph.parts import RESERVED
from ..graph.structure import structure_problems
from ..spec.document import Leaf, Node, Table, Where
from ..spec.expression import parse_expression
from ..spec.flow import parse_flow
from ..spec.library import Spec, plain
from ..spec.signature import ACTIVATIONS, parse_signature
from .loader import weight_problems
from .source import Source

__all__ = ["check_spec"]


def check_spec(spec: Spec, config: Mapping[str, Any], source: Source) -> list[InferflowError]:
    """All problems of `spec` with `source`, in the order a user would mend them. Empty when the model can be served."""
    problems: list[InferflowError] = [*_text_problems(spec), *_config_problems(spec, config)]
    if problems:
        return problems
    try:
        build = build_graph(spec, config, source.tensors)
    except SpecError as error:
        return [error]
    read = set(build.read)
    problems.extend(weight_problems(build.graph, spec, config, source, read))
    if not problems:
        problems.extend(_unread(spec, read))
    return problems


# ------------------------------------------------------------------------------------------------ the text


def _text_problems(spec: Spec) -> Iterator[InferflowError]:
    yield from structure_problems(spec)
    for name, node in spec.tree.items():
        if isinstance(node, Table) and name not in RESERVED:
            yield from _part_problems(node)
    for node in spec.tree.table("let").values():
        yield from _expression(node)
    flow = spec.tree.table("model").get("flow")
    yield from _attempt(parse_flow, flow) if flow is not None else ()
    for block in spec.blocks.values():
        if isinstance(block, Table):
            yield from _attempt(parse_signature, block.table("params"))
            yield from _attempt(parse_flow, block["flow"]) if "flow" in block else ()


def _part_problems(table: Table) -> Iterator[InferflowError]:
    for key, node in table.items():
        if key == "flow":
            yield from _attempt(parse_flow, node)
        elif isinstance(node, Table):
            yield from _part_problems(node)
        elif key not in ("block", "prefix", "suffix", "args"):
            yield from _expression(node)


def _expression(node: Node) -> Iterator[InferflowError]:
    if isinstance(node, Leaf) and isinstance(node.value, str) and node.value not in ACTIVATIONS:
        try:
            parse_expression(node.value, node.where)
        except SpecError as error:
            yield error


def _config_problems(spec: Spec, config: Mapping[str, Any]) -> Iterator[InferflowError]:
    """``cfg.name`` that the config lacks and that is nearly one it has. Absent keys are None: nothing else would say so."""
    for _, node in _leaves(spec.tree, ()):
        if node.where.file != spec.files[0] or not isinstance(node, Leaf) or not isinstance(node.value, str):
            continue
        found = list(re.finditer(r"\bcfg\.(\w+)", node.value))
        keys = [match[1] for match in found]
        for match in found:
            key = match[1]
            close = difflib.get_close_matches(key, [k for k in config if not k.startswith("_")], n=1, cutoff=0.85)
            if key not in config and close and close[0] not in keys:
                where = node.where.shift(node.where.quote + match.start()) if "\n" not in node.value else node.where
                yield SpecError(f"the config has no '{key}'", where=str(where), fix=f"did you mean cfg.{close[0]}?")


def _attempt(parse: Any, node: Node) -> Iterator[InferflowError]:
    try:
        parse(node)
    except SpecError as error:
        yield error


# ------------------------------------------------------------------------------------------------ what nothing reads


def _unread(spec: Spec, read: set[Where]) -> Iterator[InferflowError]:
    """Keys of the user's own file that had no effect on this model, nor would have on one with another config."""
    own = spec.files[0]
    elsewhere = _conditional(spec, read)
    tables = [spec.tree.table("tensors"), *(t for t in spec.tree.table("tensors").values() if isinstance(t, Table))]
    roles = {role.strip() for table in tables for key in table for role in key.split(",")}
    roles |= {name for block in spec.blocks.values() if isinstance(block, Table) for name in block.table("parts")}
    for path, node in _leaves(spec.tree, ()):
        if node.where.file != own or node.where in read or _structural(path) or elsewhere(path):
            continue
        if path[0] == "tensors":
            fix = did_you_mean(path[-1], roles - {path[-1]}) or "remove it, or give a part that name"
            reason = f"no part has the role '{path[-1]}'"
        else:
            reason, fix = f"'{'.'.join(path)}' is read by nothing", "remove it, or check its name"
        yield SpecError(reason, where=str(node.where), fix=fix)


def _conditional(spec: Spec, read: set[Where]) -> Callable[[tuple[str, ...]], bool]:
    """Whether a key that was not read belongs to what a condition left out: a table with an ``if``; a part that no line
    of this model called, or a `[let]` name, but that some line or expression names; a role of such a part."""
    leaves = list(_leaves(spec.tree, ()))
    touched = {path[:-1] for path, node in leaves if node.where in read}
    guarded = {path[:-1] for path, node in leaves if path[-1] == "if" and node.where in read}
    texts = [
        node.value for path, node in leaves if path[0] not in ("tensors", "match", "gguf") and isinstance(node, Leaf)
    ]
    lines = [line.value if isinstance(line, Leaf) else line for text in texts for line in _listed(text)]
    named = {word for line in lines if isinstance(line, str) for word in re.findall(r"[^\W\d]\w*", line)}
    tables = [block.table("parts") for block in spec.blocks.values() if isinstance(block, Table)]
    parts = {name for table in tables for name in table}
    inner = [part for table in tables for part in table.values() if isinstance(part, Table)]
    parts |= {f"{plain(t.get('prefix')) or ''}{p}{plain(t.get('suffix')) or ''}" for t in inner for p in parts}

    def elsewhere(path: tuple[str, ...]) -> bool:
        if path[0] == "tensors":
            return all(role.strip().partition(".")[0] in named | parts for role in path[-1].split(","))
        if path[0] == "let":
            return path[1] in named
        # a table named somewhere, in which nothing was read, was left out as a whole: with the tables inside it
        idle = [n for n in range(1, len(path)) if not any(t[:n] == path[:n] for t in touched)]
        return any(path[:n] in guarded for n in range(len(path))) or any(path[n - 1] in named for n in idle)

    return elsewhere


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _leaves(table: Table, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    for key, node in table.items():
        inner = isinstance(node, Table) and not (path[:1] == ("tensors",) and "from" in node)
        if inner and isinstance(node, Table):
            yield from _leaves(node, (*path, key))
        else:
            yield (*path, key), node


def _structural(path: tuple[str, ...]) -> bool:
    """Keys that are read as they stand, not as values."""
    plain_keys = ("block", "flow", "count", "args", "prefix", "suffix", "ignore")
    return path[0] in ("match", "gguf", "model", "norm") or path[-1] in plain_keys
