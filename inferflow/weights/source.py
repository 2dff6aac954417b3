"""The contract of a checkpoint: names, shapes, dtypes, a config, and the bytes on demand.

A `Source` is opened by `open_source(path)`. Opening reads headers only and validates every size against the files, so
that no later read can fail for a bad offset; `read` maps the bytes and gives float32 (or the integers that were
stored).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

__all__ = ["Source", "TensorInfo"]


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor. `shape` is in NumPy's row-major order (outermost first); `dtype` is the file's own name for it
    (``F32``, ``BF16``, ``Q4_K`` …); `nbytes` is what it occupies in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Source(Protocol):
    """An opened checkpoint."""

    path: Path
    format: str  # "safetensors" | "gguf" | "torch" | "l2c" | "inferflow" (a quantised directory)
    config: Mapping[str, Any]  # the model's config, in the names of a Hugging Face config.json
    metadata: Mapping[str, Any]  # the raw GGUF key-values (arrays included); empty where there are none
    tensors: Mapping[str, TensorInfo]

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes, uint8, read-only where they are mapped: ``(*shape[:-1], bytes per row)`` for GGUF, so that
        blocks can be kept as they are; 1-D, row-major, for the other formats. UnsupportedError where a tensor's bytes
        are not contiguous in its file."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32 (bit-exact widening for F16/BF16, dequantised for quantised types), shape as in
        `tensors[name]`. Not cached here. F32 may be a read-only view of the mapped file."""
        ...

    def close(self) -> None: ...
