"""What is wrong between a graph's weights and a checkpoint, told once: a fault of every layer is one problem, not eighty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..errors import CheckpointError, InferflowError
from ..graph.graph import Weight
from .advice import Advisor, MissingTensorError, pattern
from .source import Source

__all__ = ["Failed", "ManyProblemsError", "MissingTensorError", "combined", "pattern", "told_once"]

MAX_SHOWN = 8
Failed = tuple[Weight, InferflowError]


class ManyProblemsError(CheckpointError):
    """Several problems of one checkpoint as one error: its text has a line for each, indented, after the first."""

    def __init__(self, problems: Sequence[InferflowError], where: str) -> None:
        self.problems = tuple(problems)
        fix = "the checkpoint is incomplete or the spec does not describe it: 'inferflow spec check' lists everything"
        super().__init__(f"{len(problems)} things do not fit", where=where, fix=fix)

    def __str__(self) -> str:
        said = f" has no tensor in {self.where}"  # once is enough
        shown = [str(problem).replace(said, " has no tensor") for problem in self.problems[:MAX_SHOWN]]
        lines = [super().__str__(), *shown]
        more = len(self.problems) - MAX_SHOWN
        return "\n  ".join([*lines, f"and {more} more"] if more > 0 else lines)


def told_once(
    failed: Sequence[Failed], unused: Sequence[str], source: Source, where: str, advisor: Advisor
) -> list[InferflowError]:
    """The problems, the same fault of several layers as one. `unused` are names that nothing reads; `where` is the place
    in the spec to map them at."""
    whole = _missing_layers(failed, advisor)
    out: list[InferflowError] = [_no_layer(stack, layers, source, where) for stack, layers in whole.items()]
    kept = [(w, e) for w, e in failed if w.layer not in whole.get(w.stack, ())]
    groups: dict[tuple[str, ...], list[Failed]] = {}
    for weight, error in kept:
        role = (weight.stack, weight.role, weight.slot) if isinstance(error, CheckpointError) else ()
        groups.setdefault((*role, error.where), []).append((weight, error))
    for items in groups.values():
        weight, error = items[0]
        if isinstance(error, MissingTensorError):
            more = len(items) - 1
            error.reason += (
                f" (nor {'has' if more == 1 else 'have'} {more} other layer{'s' * (more > 1)})" if more else ""
            )
            error.fix = advisor.missing(weight, error, unused)
        out.append(error)
    if not all(isinstance(e, MissingTensorError) for _, e in failed):
        return out  # mended first; until then what they would have read seems unused
    meant = {pattern(e.close) for _, e in kept if isinstance(e, MissingTensorError)}
    names: dict[str, list[str]] = {}
    for name in unused:
        if pattern(name) not in meant:
            names.setdefault(pattern(name), []).append(name)
    return out + [_unused(found, source, where, advisor) for found in names.values()]


def _missing_layers(failed: Sequence[Failed], advisor: Advisor) -> dict[str, list[int]]:
    """For each stack the layers of which there is nothing at all, where other layers have something."""
    wanted = Counter((w.stack, w.layer) for w in advisor.weights.values() if w.stack)
    lost = Counter((w.stack, w.layer) for w, e in failed if isinstance(e, MissingTensorError))
    out: dict[str, list[int]] = {}
    for stack in {stack for stack, _ in wanted}:
        layers = [layer for s, layer in wanted if s == stack]
        gone = [n for n in layers if lost[stack, n] == wanted[stack, n] > 1]
        if gone and len(gone) < len(layers):
            out[stack] = gone
    return out


def _no_layer(stack: str, layers: list[int], source: Source, where: str) -> InferflowError:
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    which = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    many = len(layers) > 1
    reason = (
        f"layer{'s' * many} {', '.join(which)} of '{stack}' {'lack all their' if many else 'lacks all its'} tensors"
    )
    fix = "a file is missing, or the config counts more layers than there are"
    return CheckpointError(f"{reason} in {source.path}", where=where, fix=fix)


def _unused(names: list[str], source: Source, where: str, advisor: Advisor) -> InferflowError:
    info = source.tensors[names[0]]
    many = f" and {len(names) - 1} like it are" if len(names) > 1 else " is"
    reason = f"tensor '{names[0]}' {list(info.shape)}{many} used by no part of the spec"
    return CheckpointError(reason, where=where, fix=advisor.unused(names[0]))


def combined(problems: Sequence[InferflowError], source: Source) -> CheckpointError:
    """All problems as one error about the checkpoint."""
    if len(problems) == 1:
        only = problems[0]
        return CheckpointError(f"{only.where}: {only.reason}", where=str(source.path), fix=only.fix)
    return ManyProblemsError(problems, str(source.path))
