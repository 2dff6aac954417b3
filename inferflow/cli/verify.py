"""Comparing a model with transformers: the same checkpoint, the same tokens, float32 on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from inferflow.errors import UnsupportedError
from inferflow.llm import LLM

__all__ = ["compare"]


def compare(path: Path, spec: str | None, prompt: str) -> dict[str, Any]:
    """``max_difference``, ``max_logit``, ``same_top``, ``tokens``. UnsupportedError where transformers cannot do its part."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        fix = "pip install 'inferflow[torch]' transformers"
        raise UnsupportedError("transformers and torch are not installed", where="verify", fix=fix) from None
    # float32 throughout: what a spec rounds to the checkpoint's own dtype, transformers does not round here either
    with LLM(path, spec, config={"dtype": "float32", "torch_dtype": "float32"}) as llm:
        ids = (
            llm.encode(prompt)[: llm.max_model_len] if llm.tokenizer else list(range(3, min(35, llm.model.graph.vocab)))
        )
        ours = llm.logits(ids)
    folder = path if path.is_dir() else path.parent
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if path.suffix == ".gguf":
        options["gguf_file"] = path.name
    try:
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        theirs.eval()
        with torch.no_grad():
            want = theirs(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    except (OSError, ValueError, ImportError, KeyError, NotImplementedError) as error:
        reason = f"transformers cannot run it: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise UnsupportedError(reason, where=str(path), fix="verify a model that transformers can load") from None
    width = min(ours.shape[1], want.shape[1])
    return {
        "tokens": len(ids),
        "max_difference": float(np.abs(ours[:, :width] - want[:, :width]).max()),
        "max_logit": float(np.abs(want).max()),
        "same_top": int((ours.argmax(-1) == want.argmax(-1)).sum()),
    }
