"""Inferflow: an LLM inference engine in which a TOML file says what a model is.

`LLM` and `SamplingParams` are imported when first used, so that ``import inferflow`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llm import LLM, Chunk, Completion
    from .runtime.sampler import SamplingParams

__all__ = ["LLM", "Chunk", "Completion", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Chunk", "Completion"):
        from . import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from .runtime.sampler import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'inferflow' has no attribute '{name}'")
