"""One row of the parity table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
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


def sparse(*drop: str, **more: Any) -> Any:
    """A rewrite of config.json to an early one: of what was saved only the sizes (but those in `drop`), and `more`."""

    def rewrite(folder: Path) -> None:
        path = folder / "config.json"
        saved = json.loads(path.read_text("utf-8"))
        kept = {key: saved[key] for key in SIZES if key in saved and key not in drop}
        path.write_text(json.dumps({**kept, **more}), "utf-8")

    return rewrite


SIZES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions", "num_layers"),
    *("num_heads", "ffn_dim", "d_model", "n_layers", "n_heads", "max_seq_len"),
)
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
