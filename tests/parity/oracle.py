"""Tiny random models made by transformers, and what they answer."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .table import Row


@functools.lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inferflow-parity-")


def randomise(model: torch.nn.Module, scale: float) -> None:
    """Weights that make every part matter: matrices that keep the variance, norms and biases away from one and zero."""
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * scale * parameter.shape[-1] ** -0.5)
            elif "norm" in name or ".ln" in name:
                parameter.copy_(parameter + 0.2 * noise)
            else:
                parameter.copy_(0.2 * noise)


@functools.lru_cache(maxsize=4)
def _make(name: str) -> tuple[Path, tuple[int, ...], np.ndarray]:
    from .table import ROWS

    row = next(r for r in ROWS if r.name == name)
    config = AutoConfig.for_model(row.model_type, **row.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model, row.scale)
    if row.adjust is not None:
        row.adjust(model)
    folder = Path(_folder().name) / row.name
    model.save_pretrained(folder)
    if row.rewrite is not None:
        row.rewrite(folder)
    vocab = model.get_output_embeddings().weight.shape[0]
    ids = tuple(int(i) for i in np.random.default_rng(7).integers(3, vocab, row.prompt))
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    return folder, ids, logits


def oracle(row: Row) -> tuple[Path, list[int], np.ndarray]:
    """(checkpoint folder, prompt, logits [tokens, vocab]) of `row`."""
    folder, ids, logits = _make(row.name)
    return folder, list(ids), logits
