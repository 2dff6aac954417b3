"""Inferflow: an LLM inference engine in which a TOML file says what a model is.

Its names are imported when first used, so that ``import inferflow`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answers import Choice, Chunk, Completion, Timings, TokenLogprob
    from .async_llm import AsyncLLM
    from .llm import LLM
    from .runtime.engine import Options
    from .runtime.sampler import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "Choice",
    "Chunk",
    "Completion",
    "Options",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
    "__version__",
]
__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": ".async_llm",
    "LLM": ".llm",
    "Options": ".runtime.engine",
    "SamplingParams": ".runtime.sampler",
} | dict.fromkeys(("Choice", "Chunk", "Completion", "Timings", "TokenLogprob"), ".answers")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'inferflow' has no attribute '{name}'")
