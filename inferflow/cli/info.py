"""``inferflow info``."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import click
from click.core import ParameterSource

from inferflow.errors import ArgumentError

from .config import named_model
from .options import dumps, find_model, lines_for_people, model_options, spec_option

__all__ = ["info"]


@click.command()
@click.argument("path", metavar="[MODEL]", required=False, callback=named_model, is_eager=True)
@model_options
@spec_option
@click.option("--tensors", is_flag=True, help="List every tensor of the file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def info(
    path: str | None, model: str | None, spec_name: str | None, offline: bool, tensors: bool, as_json: bool
) -> None:
    """Say what MODEL is: its spec, sizes and tensors, and what would run it here."""
    from inferflow.runtime.model import load_model
    from inferflow.text import load_tokenizer

    given = click.get_current_context().get_parameter_source("model")
    if path is not None and given is ParameterSource.COMMANDLINE:
        raise ArgumentError("the model is given twice", where="MODEL", fix="leave -m out")
    found = find_model(model if path is None else path, offline)
    loaded = load_model(found, spec_name)
    report = describe(loaded)
    tokenizer = load_tokenizer(loaded.source, found)
    report["tokenizer"] = None if tokenizer is None else {
        "vocab": tokenizer.vocab_size, "bos": tokenizer.bos_id, "eos": sorted(tokenizer.eos_ids),
        "chat_template": tokenizer.chat_template is not None,
    }  # fmt: skip
    if tensors:
        report["tensors"] = [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "bytes": t.nbytes, "bits_per_weight": bits(t)}
            for t in loaded.source.tensors.values()
        ]
    loaded.source.close()
    click.echo(dumps(report) if as_json else table(report))


def describe(loaded: Any) -> dict[str, Any]:
    """The figures of a loaded model."""
    from inferflow.graph.dump import totals

    stored = Counter[str]()
    for tensor in loaded.source.tensors.values():
        stored[tensor.dtype] += tensor.nbytes
    cost = totals(loaded.graph)
    size = sum(stored.values())
    return {
        "path": str(loaded.source.path), "format": loaded.source.format, "spec": loaded.spec.name,
        "parameters": loaded.parameters, "bytes": size, "bits_per_weight": round(8 * size / loaded.parameters, 2),
        "bytes_by_type": dict(stored.most_common()), "layers": loaded.graph.layers, "vocab": loaded.graph.vocab,
        "context": loaded.config.get("max_position_embeddings"), "flops_per_token": cost["flops"],
        "weights_per_token": cost["weights"], "kv_elements_per_token": cost["kv"], "engine": engine(),
        "warnings": loaded.weights.warnings,
    }  # fmt: skip


def engine() -> dict[str, Any]:
    """What runs models here, unless told otherwise: its ``name``; of the native engine also ``isa`` and ``threads``."""
    from inferflow.kernels import native

    if not native.available():
        return {"name": "reference (NumPy)"}
    return {"name": "native", "isa": native.isa_name(), "threads": native.default_threads()}


def bits(tensor: Any) -> float | None:
    """Bits per weight of a stored tensor; None for one without elements."""
    elements = math.prod(tensor.shape)
    return round(8 * tensor.nbytes / elements, 2) if elements else None


def table(report: dict[str, Any]) -> str:
    """Aligned lines for people."""
    lines = []
    for key, value in report.items():
        if key == "tensors":
            lines += [tensor_line(**tensor) for tensor in value]
        elif key == "warnings":
            lines += [f"warning               {text}" for text in value]
        elif isinstance(value, dict):
            inside = ", ".join(
                f"{k} {v:,}" if isinstance(v, int) and not isinstance(v, bool) else f"{k} {v}" for k, v in value.items()
            )
            lines.append(f"{key:<21} {inside}")
        else:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
            lines.append(f"{key:<21} {shown}")
    return lines_for_people(lines)


def tensor_line(name: str, shape: list[int], dtype: str, bytes: int, bits_per_weight: float | None) -> str:
    """One tensor for people."""
    return f"  {dtype:<8} {bits_per_weight or 0:6.2f} bits {bytes:>14,} bytes  {name} {shape}"
