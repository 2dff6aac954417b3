"""Inferflow itself, measured through the same interface, by its own step loop: sampling is part of its times."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from inferflow.llm import LLM
from inferflow.runtime.engine import Engine as StepLoop
from inferflow.runtime.engine import Sequence as Running
from inferflow.runtime.sampler import SamplingParams

from .peers import Batched, Floats

__all__ = ["Inferflow"]


class Inferflow:
    """A `Scorer`. The path is whatever `LLM` takes; GGUF blocks are kept as they are."""

    def __init__(self, path: str, threads: int) -> None:
        self._llm = LLM(path, threads=threads)
        self._loops: dict[tuple[int, int], StepLoop] = {}
        self._rng = np.random.default_rng()

    def prefill(self, tokens: int) -> float:
        return self.batched(1, tokens, 1).prefill

    def decode(self, tokens: int, context: int) -> float:
        return self.batched(1, context, tokens + 1).decode  # the first comes out of the prompt's step

    def batched(self, sequences: int, prompt: int, output: int) -> Batched:
        loop = self._loop(sequences, prompt + output)
        start = time.perf_counter()
        batch = [self._add(loop, prompt, output) for _ in range(sequences)]
        while any(len(s.ids) == prompt for s in batch):
            loop.step()
        first = time.perf_counter() - start
        made = sum(len(s.ids) - prompt for s in batch)
        while any(s.finish is None for s in batch):
            loop.step()
        both = time.perf_counter() - start
        if any(len(s.ids) != prompt + output for s in batch):
            raise RuntimeError("a sequence ended early")
        decode = (sequences * output - made) / (both - first)
        return Batched(sequences * prompt / first, decode, sequences * output / both)

    def tokenize(self, text: str) -> list[int]:
        return self._llm.encode(text)

    def logits(self, tokens: Sequence[int], first: int) -> Floats:
        return self._llm.logits(tokens)[first:]

    def _loop(self, sequences: int, length: int) -> StepLoop:
        """A step loop with a cache for just these; it is made once, and again after another was."""
        if (sequences, length) not in self._loops:
            graph, executor = self._llm.model.graph, self._llm.engine.executor
            made = StepLoop(graph, executor, max_len=length, slots=sequences)
            self._loops = {(sequences, length): made}  # an executor has one cache at a time
        return self._loops[sequences, length]

    def _add(self, loop: StepLoop, prompt: int, output: int) -> Running:
        ids = self._rng.integers(0, loop.graph.vocab, prompt).tolist()
        return loop.add(ids, SamplingParams(max_tokens=output, ignore_eos=True))
