"""OpenVINO GenAI as a peer: its pipeline reads GGUF files itself, and batches continuously. Its Python interface shows no
logits. Everything is left as it comes but the number of threads: 8-bit caches, greedy sampling, which is timed with the rest.
"""

from __future__ import annotations

import time

import numpy as np
import openvino  # type: ignore[import-untyped]
import openvino_genai  # type: ignore[import-untyped]

from .peers import Batched

__all__ = ["OpenVino"]


class OpenVino:
    """An `Engine`."""

    def __init__(self, path: str, threads: int) -> None:
        self._pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
        self._size = len(self._pipeline.get_tokenizer().get_vocab())
        self._rng = np.random.default_rng()

    def prefill(self, tokens: int) -> float:
        first, _ = self._run(1, tokens, 1)
        return tokens / first

    def decode(self, tokens: int, context: int) -> float:
        return self.batched(1, context, tokens + 1).decode  # the first comes out of the prompt's run

    def batched(self, sequences: int, prompt: int, output: int) -> Batched:
        first, rest = self._run(sequences, prompt, output)
        decode = sequences * (output - 1) / rest
        return Batched(sequences * prompt / first, decode, sequences * output / (first + rest))

    def _run(self, sequences: int, prompt: int, output: int) -> tuple[float, float]:
        """Seconds until each sequence has its first token, and until all have all of them."""
        config = openvino_genai.GenerationConfig(max_new_tokens=output, ignore_eos=True, do_sample=False)
        ids = self._rng.integers(0, self._size, (sequences, prompt), dtype=np.int64)
        mask = openvino.Tensor(np.ones_like(ids))
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), mask)
        start = time.perf_counter()
        result = self._pipeline.generate(inputs, config)
        seconds = time.perf_counter() - start
        if any(len(tokens) != output for tokens in result.tokens):
            raise RuntimeError("a sequence ended early")
        metrics = result.perf_metrics
        # One step a token: every prompt was run in the first, so the time to the first token is that of all of them.
        if len(metrics.raw_metrics.m_batch_sizes) != output:
            raise RuntimeError("the prompts were not run together")
        first = metrics.get_ttft().mean / 1000
        return first, seconds - first
