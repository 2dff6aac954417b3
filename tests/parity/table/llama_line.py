"""Pre-norm RMS decoders with rotary positions and gated feed-forward."""

from __future__ import annotations

from .row import SMALL, Row

BANDS = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

ROWS = [
    Row("llama", "llama", SMALL),
    Row("llama-mha-tied", "llama", {**SMALL, "num_key_value_heads": 6, "tie_word_embeddings": True}),
    Row("llama-biases-headdim", "llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    Row("llama-3.1", "llama", {**SMALL, "rope_scaling": BANDS, "rope_theta": 500000.0}),
]
