"""Encoding with the `tokenizers` library, other threads running meanwhile."""

from __future__ import annotations

import os

from tokenizers import Tokenizer as Engine

__all__ = ["encode"]

# The library lets go of the GIL for batches alone. A batch of one needs no threads, which a forked child would not have.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def encode(engine: Engine, text: str) -> list[int]:
    """The ids of `text`, nothing added."""
    ids: list[int] = engine.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
