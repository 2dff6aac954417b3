"""What is wrong between a graph's weights and a checkpoint, told once: a fault of every layer is one problem, not eighty."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import CheckpointError, InferflowError
from ..graph.graph import Weight
from .source import Source

__all__ = ["Failed", "MissingTensorError", "combined", "pattern", "told_once"]

MAX_SHOWN = 8
Failed = tuple[Weight, InferflowError]


class MissingTensorError(CheckpointError):
    """A weight has no tensor; `close` is the name of one that may be meant, or empty."""

    close = ""


def pattern(name: str) -> str:
    """A tensor's name without the numbers that count layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name)


def told_once(failed: Sequence[Failed], unused: Sequence[str], source: Source, where: str) -> list[InferflowError]:
    """The problems, the same fault of several layers as one. `unused` are names that nothing reads; `where` is the place
    in the spec to map them at."""
    whole = _missing_layers(failed)
    out: list[InferflowError] = [_no_layer(stack, layers, source, where) for stack, layers in whole.items()]
    kept = [(w, e) for w, e in failed if w.layer not in whole.get(w.stack, ())]
    groups: dict[tuple[str, ...], list[Failed]] = {}
    for weight, error in kept:
        role = (weight.stack, weight.role, weight.slot) if isinstance(error, CheckpointError) else ()
        groups.setdefault((*role, error.where), []).append((weight, error))
    for items in groups.values():
        error, more = items[0][1], len(items) - 1
        error.reason += f" (nor have {more} other layers)" if more and isinstance(error, MissingTensorError) else ""
        out.append(error)
    if not all(isinstance(e, MissingTensorError) for _, e in failed):
        return out  # mended first; until then what they would have read seems unused
    meant = {pattern(e.close) for _, e in kept if isinstance(e, MissingTensorError)}
    names: dict[str, list[str]] = {}
    for name in unused:
        if pattern(name) not in meant:
            names.setdefault(pattern(name), []).append(name)
    return out + [_unused(found, source, where) for found in names.values()]


def _missing_layers(failed: Sequence[Failed]) -> dict[str, list[int]]:
    """For each stack the last layers of which there is nothing at all, where layers before them are complete."""
    lost: dict[tuple[str, int], int] = {}
    for weight, error in failed:
        if weight.stack and isinstance(error, MissingTensorError):
            lost[weight.stack, weight.layer] = lost.get((weight.stack, weight.layer), 0) + 1
    bad = {(w.stack, w.layer) for w, _ in failed}
    out: dict[str, list[int]] = {}
    for (stack, layer), count in lost.items():
        if count > 1 and (stack, 0) not in bad:
            out.setdefault(stack, []).append(layer)
    return out


def _no_layer(stack: str, layers: list[int], source: Source, where: str) -> InferflowError:
    which = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    fix = "a file is missing, or the config counts more layers than there are"
    return CheckpointError(f"{which} of '{stack}' lack tensors in {source.path}", where=where, fix=fix)


def _unused(names: list[str], source: Source, where: str) -> InferflowError:
    info = source.tensors[names[0]]
    many = f" and {len(names) - 1} like it are" if len(names) > 1 else " is"
    reason = f"tensor '{names[0]}' {list(info.shape)}{many} used by no part of the spec"
    fix = f'map it in [tensors], or write tensors.ignore = ["{pattern(names[0]).replace("{i}", "*")}"]'
    return CheckpointError(reason, where=where, fix=fix)


def combined(problems: Sequence[InferflowError], source: Source) -> CheckpointError:
    """All problems as one error about the checkpoint."""
    if len(problems) == 1:
        only = problems[0]
        return CheckpointError(f"{only.where}: {only.reason}", where=str(source.path), fix=only.fix)
    more = f" (and {len(problems) - MAX_SHOWN} more)" if len(problems) > MAX_SHOWN else ""
    fix = "the checkpoint is incomplete or the spec does not describe it: 'inferflow spec check' lists everything"
    return CheckpointError("; ".join(map(str, problems[:MAX_SHOWN])) + more, where=str(source.path), fix=fix)
