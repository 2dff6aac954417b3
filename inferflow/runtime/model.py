"""A model, ready to run: its checkpoint, spec, graph and weights, put together in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, CheckpointError
from ..graph.build import build_graph
from ..graph.graph import Graph
from ..spec.library import Spec, find_spec, for_gguf, load_spec
from ..weights.choice import Choice, parse_choice
from ..weights.loader import Weights, plan_weights
from ..weights.open import open_source
from ..weights.quantised import QuantisedSource
from ..weights.source import Source

__all__ = ["Model", "Quant", "context_length", "end_tokens", "load_model"]

Quant = str | Path | Mapping[str, Any] | Choice | None


@dataclass(frozen=True)
class Model:
    """What the parts of a loaded model are. `config` includes the caller's overrides."""

    source: Source
    config: Mapping[str, Any]
    spec: Spec
    graph: Graph
    weights: Weights

    @property
    def parameters(self) -> int:
        """Distinct stored elements that the model reads."""
        names = {name for plan in self.weights.plans.values() for name in plan.names}
        total = 0
        for name in names:
            size = 1
            for n in self.source.tensors[name].shape:
                size *= n
            total += size
        return total


def context_length(model: Model) -> tuple[int | None, int | None]:
    """(the length the model was made for, by its config; the length it cannot exceed: rows of a table of positions)."""
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    stated = [model.config.get(key) for key in keys]
    made_for = next((int(n) for n in stated if isinstance(n, int | float) and not isinstance(n, bool) and n >= 1), None)
    tables = [n for n in model.graph.nodes if n.op == "embed" and n.inputs == (model.graph.inputs["positions"],)]
    return made_for, min((n.params["rows"].size - n.params["offset"] for n in tables), default=None)


def end_tokens(config: Mapping[str, Any]) -> frozenset[int]:
    """The ids that end an answer, as config.json and generation_config.json declare them."""
    generation = config.get("generation")
    declared = [table.get("eos_token_id") for table in (config, generation) if isinstance(table, Mapping)]
    flat = [i for d in declared for i in (d if isinstance(d, list) else [d])]
    return frozenset(i for i in flat if isinstance(i, int))


def choose_spec(source: Source, spec: str | Path | None, config: Mapping[str, Any]) -> tuple[Spec, Mapping[str, Any]]:
    """(the spec as it applies to this kind of file, the part of the config it reads)."""
    if spec is None and isinstance(source, QuantisedSource):
        chosen = replace(load_spec(source.spec_path), name=source.spec_name)
    else:
        chosen = find_spec(config) if spec is None else load_spec(spec)
    root = chosen.value("match", "root")
    if isinstance(root, str) and isinstance(config.get(root), Mapping):
        config = {**config, **config[root]}
    return (for_gguf(chosen) if source.format == "gguf" else chosen), config


def load_model(
    path: str | Path, spec: str | Path | None = None, overrides: Mapping[str, Any] | None = None, quant: Quant = None
) -> Model:
    """Open `path`, choose or load the spec, prove every shape. Weights are read when first used.

    `overrides` replace keys of the model's config (``{"rope_scaling": {…}}``). `quant` says in which formats the matrices are
    held (see `inferflow.weights.choice`; None: as the file has them). Raises SpecError, CheckpointError, ArgumentError.
    """
    choice = parse_choice(quant)
    source = open_source(path)
    config: Mapping[str, Any] = {**source.config, **(overrides or {})}
    if not source.tensors:
        raise CheckpointError("it has no tensors", where=str(path), fix="download it again")
    chosen, config = choose_spec(source, spec, config)
    if isinstance(source, QuantisedSource) and not choice.keeps_all:
        fix = "quantise the original model instead"
        raise ArgumentError(f"{path} is quantised already", where="quant", fix=fix)
    graph = build_graph(chosen, config, source.tensors).graph
    return Model(source, config, chosen, graph, plan_weights(graph, chosen, config, source, choice))
