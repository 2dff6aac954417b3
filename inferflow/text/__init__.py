"""Text on both sides of a model: tokenizers, chat templates, incremental decoding, stop strings."""

from __future__ import annotations

from .tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
