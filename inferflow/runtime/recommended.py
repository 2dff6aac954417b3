"""What a model's own files say about sampling: the defaults that stand between a user's wishes and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError
from ..spec.expression import show
from .sampling_params import SamplingParams

__all__ = ["recommended_params"]

FILE = "generation_config.json"
# The names are those of SamplingParams, and mean the same.
NAMES = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def recommended_params(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of SamplingParams that the generation_config.json of a model recommends, `config` being the model's, and a
    sentence for each value of it that cannot be used and is left out.

    With ``do_sample`` false the model wants greedy answers, whatever else is said; with true it wants sampled ones, at
    temperature 1 unless another is said."""
    table = config.get("generation")
    found: dict[str, Any] = {}
    warnings: list[str] = []
    for name in NAMES:
        value = table.get(name) if isinstance(table, Mapping) else None
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
            found[name] = value
        except ArgumentError as error:
            warnings.append(f"{FILE}: {name} is {show(value)} and is left out: {error.fix}")
    samples = table.get("do_sample") if isinstance(table, Mapping) else None
    if samples is False:
        found = {"temperature": 0.0} | {name: found[name] for name in found if name == "repetition_penalty"}
    elif samples is True:
        found.setdefault("temperature", 1.0)
    return found, warnings
