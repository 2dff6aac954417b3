"""Quantising a model into a directory, with or without a calibration text, a matrix at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..spec.write import spec_text
from ..weights.choice import KEEP, Fallback
from ..weights.directory import DirectoryWriter, new_directory
from ..weights.quantised import QuantisedSource
from ..weights.stored import Stored, narrowest
from ..weights.widen import ITEM_BYTES
from .model import Model

__all__ = ["Progress", "Report", "quantise_model", "uncalibrated"]

# (what is done now, weights done, weights in all)
Progress = Callable[[str, int, int], None]


@dataclass
class Report:
    """What came out. `bytes` is the whole file, `bits_per_weight` all of it over the model's weights; `formats` has the number
    of tensors and their bytes by format."""

    path: Path
    bytes: int = 0
    weights: int = 0
    seconds: float = 0.0
    formats: dict[str, tuple[int, int]] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / max(self.weights, 1)


def uncalibrated(model: Model, keys: Iterable[str], rotation: int) -> Iterator[tuple[str, Stored]]:
    """Every matrix in its format, by its weights alone."""
    for key in keys:
        yield key, model.weights.make(key, rotation)


def quantise_model(
    model: Model, out: Path, matrices: Callable[[list[str]], Iterable[tuple[str, Stored]]], *, force: bool = False,
    facts: dict[str, Any] | None = None, progress: Progress | None = None,
) -> Report:  # fmt: skip
    """Write `model` as the directory `out`. `matrices` gives the matrices of the keys it is asked for, in any order; `facts` is
    for the record. Raises ArgumentError where `out` cannot be made, the model is quantised already or would stay as it is;
    CheckpointError for numbers that are not finite."""
    if isinstance(model.source, QuantisedSource):
        raise ArgumentError("it is quantised already", where=str(model.source.path), fix="give the original model")
    if _stays(model):
        reason = "no matrix would get another format than it has in the file"
        raise ArgumentError(reason, where="quant", fix="name a format: q3.5, or q4,output=q8")
    began = time.monotonic()
    weights, source = model.weights, model.source
    spec = spec_text(model.spec, source.tensors)
    first: dict[object, str] = {}
    same = {key: first.setdefault((*weights.ident(key), key in weights.formats), key) for key in model.graph.weights}
    own = [key for key in same if same[key] == key]
    total = sum(_elements(model, key) for key in own)
    report = Report(out, weights=total)
    counts, sizes, done = Counter[str](), Counter[str](), 0
    with new_directory(out, force) as folder:
        with DirectoryWriter(folder, own) as writer:
            for key, stored in _all(model, own, matrices):
                if not stored.finite():
                    raise weights.not_finite(key)
                writer.add(key, stored)
                counts[stored.format] += 1
                sizes[stored.format] += stored.nbytes
                done += _elements(model, key)
                if progress is not None:
                    progress(key, done, total)
            for key, other in same.items():
                if key != other:
                    writer.alias(key, other)
            writer.finish(source, spec, model.spec.name, facts or {})
        report.bytes = (folder / "model.safetensors").stat().st_size
    report.fallbacks = list(weights.fallbacks)
    report.formats = {name: (counts[name], sizes[name]) for name in counts}
    report.seconds = time.monotonic() - began
    return report


def _stays(model: Model) -> bool:
    """Whether the result would be a copy: all is kept as it is, no format was refused, and no tensor is in blocks."""
    weights = model.weights
    asked = bool(weights.fallbacks) or any(format_ != KEEP for format_ in weights.formats.values())
    return not asked and all(info.dtype in ITEM_BYTES for info in model.source.tensors.values())


def _elements(model: Model, key: str) -> int:
    count = 1
    for size in model.graph.weights[key].sizes:
        count *= size
    return count


def _all(
    model: Model, own: list[str], matrices: Callable[[list[str]], Iterable[tuple[str, Stored]]]
) -> Iterator[tuple[str, Stored]]:
    formats = model.weights.formats
    for key in own:
        if key not in formats:
            yield key, narrowest(model.weights.read(key))
    yield from matrices([key for key in own if key in formats])
