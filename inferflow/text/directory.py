"""A `Tokenizer` from a directory: ``tokenizer.json`` and the configuration files beside it."""

from __future__ import annotations

from pathlib import Path

from .tokenizer import Tokenizer

__all__ = ["load_directory"]


def load_directory(path: Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None where it holds no ``tokenizer.json``."""
    return None
