"""One step's work, frozen: flat tokens of several sequences, each at its own position, and the rows whose logits are wanted.

A sequence may give one token (decode), a chunk of its prompt, or all of it; the engine sees only tokens, positions and block
tables, so prefill, chunked prefill, decode and any mixture are one case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Span", "StepBatch"]


@dataclass(frozen=True)
class Span:
    """One sequence's share of a step: tokens ``[start, start + count)`` of the flat batch, at positions
    ``past .. past + count - 1``. `blocks` is its block table; `length` the number of tokens it may come to have; `slot` its
    row in the states, which no other sequence of the cache has."""

    start: int
    count: int
    past: int
    blocks: tuple[int, ...]
    length: int
    slot: int = 0


@dataclass(frozen=True)
class StepBatch:
    """`tokens` int64 [T], `positions` int64 [T], `rows` int64 [R]: indices into the flat tokens, in the order of the logits."""

    tokens: np.ndarray
    positions: np.ndarray
    spans: tuple[Span, ...]
    rows: np.ndarray
