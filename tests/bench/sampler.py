"""What choosing tokens costs: milliseconds for 32 rows of a vocabulary of 49,152, the least of several runs, by kind. By the
clock, on the threads that an engine would have.

    python tests/bench/sampler.py [LOGITS.npy]

LOGITS: float32 [rows, vocab] of a model; without it, noise that is as peaked as a small model's.
"""

from __future__ import annotations

import sys
import timeit
from typing import Any

import numpy as np

from inferflow.kernels import native
from inferflow.runtime.sampler import SamplerState, SamplingParams, sample

ROWS, VOCAB = 32, 49_152
KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95}, {"temperature": 0.8, "min_p": 0.05}, {"temperature": 1.0, "mirostat": 2},
    {"temperature": 0.8, "top_k": 40, "typical_p": 0.9}, {"temperature": 0.8, "typical_p": 0.9}, {"logprobs": 5},
    {"repetition_penalty": 1.1}, {"frequency_penalty": 0.5}, {"dry_multiplier": 0.8}, {"fsd_alpha": 0.5},
]  # fmt: skip


def noise() -> np.ndarray:
    rng = np.random.default_rng(0)
    logits = 3.5 * rng.standard_normal((ROWS, VOCAB))
    logits[:, :8] += rng.uniform(5, 20, (ROWS, 8))
    return logits.astype(np.float32)


def main() -> None:
    given = np.load(sys.argv[1]) if len(sys.argv) > 1 else noise()
    logits = np.ascontiguousarray(np.resize(given, (ROWS, given.shape[1])).astype(np.float32))
    pool = native.Pool() if native.available() else None
    text = np.random.default_rng(1).integers(0, VOCAB, 300).tolist()
    for options in KINDS:
        states = [SamplerState(SamplingParams(**options), text, 7, row, generated=text[:100]) for row in range(ROWS)]
        timer = timeit.Timer(lambda states=states: sample(logits, states, pool))  # type: ignore[misc]
        best = min(timer.repeat(repeat=15, number=4)) / 4
        print(f"{1e3 * best:8.2f} ms  {options or 'greedy'}", flush=True)


if __name__ == "__main__":
    main()
