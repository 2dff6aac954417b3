"""Text on both sides of a model: tokenizers, chat templates, incremental decoding, stop strings."""

from __future__ import annotations

from .chat import ChatTemplate
from .chat_tokens import encode_chat
from .detokenizer import Detokenizer
from .stop import StopMatcher
from .tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopMatcher", "Tokenizer", "encode_chat", "load_tokenizer"]
