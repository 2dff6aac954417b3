"""What callers pass to the Python surface, checked: each refusal names the argument, the value and what it can be."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ArgumentError, did_you_mean
from .kernels import native
from .runtime.sampler import SamplingParams
from .runtime.sampling_params import whole
from .spec.expression import show

__all__ = [
    "ENGINES",
    "Admission",
    "Prompt",
    "captured",
    "check_config",
    "check_execution",
    "choose_engine",
    "forward_slice",
    "items",
    "request",
    "token_ids",
    "whole_number",
]

ENGINES = ("native", "reference")
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Admission:
    """What a request says of itself beside how its tokens are chosen. The smallest `priority` goes first, where the policy
    looks at it; after `timeout` seconds it ends with DeadlineError; only prompts with the same `cache_salt` share prefixes."""

    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if not whole(self.priority, -(1 << 62)):
            raise ArgumentError(f"it is {show(self.priority)}", where="priority", fix="it must be a whole number")
        timed = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool) and self.timeout > 0
        if self.timeout is not None and not timed:
            raise ArgumentError(
                f"it is {show(self.timeout)}", where="timeout", fix="it must be a number of seconds above 0"
            )
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise ArgumentError(f"it is {show(self.cache_salt)}", where="cache_salt", fix="it must be a str")


def choose_engine(asked: str | None) -> str:
    """The engine's name; for None the native one, or a warning where it was not built."""
    if asked is not None:
        _one_of("engine", "engine", asked, ENGINES)
    elif not native.available():
        warnings.warn(
            "the native engine was not built; the NumPy reference, which is slow, takes its place", stacklevel=3
        )
        return "reference"
    return asked or "native"


def items(value: Any) -> list[Any]:
    """The elements of what should be a list."""
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise _no_prompt(value)
    return list(value)


def token_ids(prompt: Any) -> list[int]:
    """The ids of a prompt that is none of text."""
    ids = items(prompt)
    for item in ids:
        if not isinstance(item, int | np.integer) or isinstance(item, bool):
            raise _no_prompt(item)
    return [int(i) for i in ids]


def _no_prompt(value: object) -> ArgumentError:
    fix = "pass text, or a list of ints; LLM.generate takes several, too: [[1, 2], [3]]"
    return ArgumentError(f"{show(value)} is none: a prompt is a str or a list of token ids", where="prompt", fix=fix)


def whole_number(name: str, value: object, most: int = 1 << 24) -> None:
    if not whole(value, 1, most):
        raise ArgumentError(f"it is {show(value)}", where=name, fix=f"it must be a whole number from 1 to {most}")


def _one_of(name: str, kind: str, value: object, known: Iterable[str]) -> None:
    words = list(known)
    if not isinstance(value, str) or value not in words:
        close = did_you_mean(value[:100], words) if isinstance(value, str) else ""
        raise ArgumentError(
            f"there is no {kind} {show(value)}", where=name, fix=close or f"use one of {', '.join(words)}"
        )


def check_execution(threads: object, kv: object, isa: object) -> None:
    """The arguments of `LLM.executor`, for every engine alike."""
    if threads is not None:
        whole_number("threads", threads, native.MAX_THREADS)
    _one_of("kv", "cache type", kv, ("auto", *native.CACHE_TYPES))
    if isa is not None and (native.available() or not isinstance(isa, str)):
        _one_of("isa", "instruction set", isa, native.isas() if native.available() else ())


def check_config(config: object) -> None:
    if config is not None and not isinstance(config, Mapping):
        raise ArgumentError(f"it is {show(config)}", where="config", fix="pass a dict of the config's keys")


def captured(names: Any, known: Collection[str]) -> list[str]:
    """`names`, if they are a list of names of tensors."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError(f"it is {show(names)}", where="capture", fix='pass a list: ["logits"]')
    wanted = list[Any](names)
    for name in wanted:
        if not isinstance(name, str) or name not in known:
            said, close = (f"'{name}'", did_you_mean(name, known)) if isinstance(name, str) else (show(name), "")
            raise ArgumentError(f"there is no tensor {said}", where="capture", fix=close or "see llm.tensor_names")
    return wanted


def forward_slice(positions: Any) -> slice:
    """`positions`, if it is a slice of whole numbers that goes forwards."""
    try:
        bounds = [None if n is None else operator.index(n) for n in (positions.start, positions.stop, positions.step)]
    except (AttributeError, TypeError):
        bounds = [0, 0, 0]
    if not isinstance(positions, slice) or (bounds[2] is not None and bounds[2] < 1):
        raise ArgumentError(f"it is {show(positions)}", where="positions", fix="pass a forward slice: slice(-1, None)")
    return slice(*bounds)


def request(params: SamplingParams | None, options: dict[str, Any]) -> tuple[SamplingParams, Admission]:
    """`params`, or `options` as their fields; `options` may hold those of `Admission` beside both."""
    admission = Admission(**{name: options.pop(name) for name in Admission.__dataclass_fields__ if name in options})
    if params is not None and options:
        reason = "give SamplingParams or keywords, not both"
        raise ArgumentError(reason, where="params", fix="put all in SamplingParams")
    if params is not None:
        if not isinstance(params, SamplingParams):
            raise ArgumentError(f"it is {show(params)}", where="params", fix="pass SamplingParams(…), or keywords")
        return params, admission
    known = SamplingParams.__dataclass_fields__
    for name in options:
        if name not in known:
            fix = did_you_mean(name, known) or f"there are {', '.join(known)}"
            raise ArgumentError("there is no such sampling parameter", where=name, fix=fix)
    return SamplingParams(**options), admission
