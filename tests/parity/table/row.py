"""One row of the parity table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A tiny random model of `model_type` with this `config` (keys of its transformers config class).

    `prompt` is the number of tokens compared. `scale` multiplies the random weights (default: logits of order one). `adjust`
    is called with the torch model before it is saved, for what a config cannot say; `rewrite` with the saved folder, to make
    it what the hub has.
    """

    name: str
    model_type: str
    config: dict[str, Any]
    prompt: int = 40
    scale: float = 1.0
    adjust: Any = field(default=None, compare=False)
    rewrite: Any = field(default=None, compare=False)


SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
