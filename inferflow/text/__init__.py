"""Text on both sides of a model: tokenizers, chat templates, incremental decoding, stop strings."""

from __future__ import annotations

from .detokenizer import Detokenizer
from .stop import StopMatcher
from .tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer", "load_tokenizer"]
