"""Real GGUF files against transformers on the same dequantised weights: 64 greedy tokens after each of five prompts.

The files are looked for in $INFERFLOW_MODELS (default ~/.cache/inferflow-models); the demo model is fetched where it is absent.
Where two tokens are within 1e-3 of each other either may come first: such a near-tie ends the comparison and is listed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from inferflow.llm import LLM

FILES = {
    "smollm2": "smollm2-135m-instruct-q4_1.gguf",
    "gemma3": "gemma3-270m-q4_k_m.gguf",
    "qwen2.5-coder": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    "Die Hauptstadt von Österreich heißt",
]
NEAR = 1e-3


@pytest.fixture(params=FILES)
def real_file(request: pytest.FixtureRequest) -> Path:
    if request.param == "smollm2":
        path: Path = request.getfixturevalue("smollm2_path")
        return path
    folder = os.environ.get("INFERFLOW_MODELS") or Path.home() / ".cache" / "inferflow-models"
    path = Path(folder) / FILES[request.param]
    if not path.is_file():
        pytest.skip(f"{path.name} is not in {folder}")
    return path


def choices(model: Any, prompt: list[int], answer: list[int]) -> tuple[list[int], list[float]]:
    """What the model would have said at each place of `answer`, and how far its second choice was behind.

    One pass over prompt and answer: if every choice is the answer's own token, greedy generation gives that answer.
    """
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    best = torch.topk(logits, 2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def test_greedy_tokens_are_those_of_transformers(real_file: Path) -> None:
    """Both engines, the native one on float32 weights: 8-bit activations decide close calls their own way."""
    with LLM(real_file, max_model_len=128, quant="f32") as llm:
        prompts = [llm.encode(text) for text in PROMPTS]
        ours = llm.generate(prompts, max_tokens=64, ignore_eos=True)
        own_logits = [llm.logits(prompts[0])]
    with LLM(real_file, max_model_len=128, engine="reference") as llm:
        own_logits.append(llm.logits(prompts[0]))
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        real_file.parent, gguf_file=real_file.name, dtype=torch.float32, attn_implementation="eager"
    )
    theirs.eval()
    ties = []
    for prompt, answer in zip(prompts, ours, strict=True):
        want, margins = choices(theirs, prompt, list(answer.ids))
        for at, (a, b) in enumerate(zip(answer.ids, want, strict=True)):
            if a != b:
                assert margins[at] < NEAR, f"token {at} after {prompt}: {a} here, {b} there, {margins[at]:.4f} ahead"
                ties.append((at, margins[at]))
                break
    print(f"{real_file.name}: near-ties {ties}")
    with torch.no_grad():
        want_logits = theirs(torch.tensor([prompts[0]])).logits[0].numpy()
    difference = max(float(np.abs(logits - want_logits).max()) for logits in own_logits)
    print(
        f"{real_file.name}: greatest difference of a logit {difference:.2e} (logits to {np.abs(want_logits).max():.1f})"
    )
    assert difference < 2e-3
