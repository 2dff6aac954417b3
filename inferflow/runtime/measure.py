"""How fast a loaded model runs and what a token costs: prefill, decode, batched decode, memory's own speed beside them.

Prompts are random tokens and nothing ends a sequence early. Everything is measured once unrecorded, then in rounds that go
through all measurements in turn, so that a machine which changes with time changes all of them; the figures are medians.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..graph.graph import Graph, Weight
from ..kernels import native
from ..weights.loader import Weights
from .engine import Engine, Event, Options
from .engine import Sequence as Running
from .executor import Executor
from .native import NativeExecutor
from .sampler import SamplingParams

__all__ = ["Sizes", "engine_facts", "measure", "peak_memory", "process_age", "weight_bytes"]

BUDGET = 512  # tokens of a step
BUFFER = 256 << 20  # bytes that the bandwidth probe reads, far more than a cache holds


@dataclass(frozen=True)
class Sizes:
    """`prefill` tokens of the prompt; `decode` steps, after a prompt of as many tokens; `batches`: numbers of sequences."""

    prefill: int = 512
    decode: int = 128
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32)

    @property
    def room(self) -> int:
        """Tokens that a sequence of the largest batch may come to have: it decodes while others are still prefilled."""
        return 2 * self.decode + -(-max(self.batches) * self.decode // BUDGET) + 2

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prefill + 1, self.room)


@dataclass
class _Bench:
    engine: Engine
    sizes: Sizes
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def prefill(self) -> float:
        """Tokens a second of one prompt, until its first new token is there."""
        start = time.perf_counter()
        running = self.add(self.sizes.prefill, 1)
        while running.finish is None:
            self.step()
        return self.sizes.prefill / (time.perf_counter() - start)

    def decode(self, sequences: int) -> float:
        """Tokens a second of `sequences` that run together, each after its prompt, which is not counted."""
        batch = [self.add(self.sizes.decode, self.sizes.room - self.sizes.decode) for _ in range(sequences)]
        try:
            while any(len(s.ids) == s.prompt for s in batch):
                self.step()
            start = time.perf_counter()
            for _ in range(self.sizes.decode):
                if len(self.step()) != sequences:
                    raise AssertionError("the sequences do not run together")
            return sequences * self.sizes.decode / (time.perf_counter() - start)
        finally:
            for sequence in batch:
                self.engine.abort(sequence)

    def add(self, prompt: int, output: int) -> Running:
        ids = self.rng.integers(0, self.engine.graph.vocab, prompt).tolist()
        return self.engine.add(ids, SamplingParams(max_tokens=output, ignore_eos=True))

    def step(self) -> list[Event]:
        events = self.engine.step()
        for event in events:
            if event.error is not None:
                raise event.error
        return events


def measure(
    graph: Graph,
    executor: Executor,
    sizes: Sizes,
    repeat: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """``prefill`` and ``decode`` (one entry a batch size), each with tokens, ``tokens_per_s`` (the median) and ``runs``;
    ``read_gb_per_s``, the median of the bandwidth probed before and after each round, and ``read_runs``; ``peak_bytes`` of
    memory before the first probe. `progress` is told measurements done and in all. The executor has another cache afterwards.

    UnsupportedError where there is no memory for the cache."""
    slots = max(sizes.batches)
    options = Options(budget=BUDGET, prefix_cache=False)
    bench = _Bench(Engine(graph, executor, max_len=sizes.longest, slots=slots, options=options), sizes)
    jobs: list[Callable[[], float]] = [bench.prefill, *(lambda n=n: bench.decode(n) for n in sizes.batches)]
    runs: list[list[float]] = [[] for _ in jobs]
    bandwidth: list[float] = []
    peak = None
    for n, (round_, job) in enumerate((r, j) for r in range(repeat + 1) for j in range(len(jobs))):
        progress(n, (repeat + 1) * len(jobs))
        if job == 0 and round_:
            peak = peak or peak_memory()
            bandwidth.append(read_bandwidth(executor))
        rate = jobs[job]()
        if round_:
            runs[job].append(rate)
    bandwidth.append(read_bandwidth(executor))
    return {
        "prefill": {"tokens": sizes.prefill, **_figures(runs[0])},
        "decode": [
            {"sequences": n, "tokens": sizes.decode, **_figures(rates)}
            for n, rates in zip(sizes.batches, runs[1:], strict=True)
        ],
        "read_gb_per_s": round(statistics.median(bandwidth), 3),
        "read_runs": [round(b, 3) for b in bandwidth],
        "peak_bytes": peak,
    }  # fmt: skip


def _figures(rates: list[float]) -> dict[str, Any]:
    return {"tokens_per_s": round(statistics.median(rates), 3), "runs": [round(rate, 3) for rate in rates]}


def engine_facts(executor: Executor) -> dict[str, Any]:
    """``engine``, and for the native one ``isa``, ``threads`` and ``kv``, the type of the cache."""
    if isinstance(executor, NativeExecutor):
        return {"engine": "native", "isa": executor.isa, "threads": executor.pool.threads, "kv": executor.kv}
    return {"engine": "reference", "isa": None, "threads": None, "kv": None}


def read_bandwidth(executor: Executor) -> float:
    """GB/s at which the engine's threads can read memory; NumPy reads with one thread."""
    if isinstance(executor, NativeExecutor):
        return native.read_bandwidth(executor.pool.threads)
    data = np.ones(BUFFER // 8, np.int64)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def weight_bytes(graph: Graph, weights: Weights, executor: Executor) -> int:
    """Bytes of weights that one token of one sequence reads, as this engine holds them: one row of an embedding, the experts
    that are chosen, the whole of everything else."""
    in_native = isinstance(executor, NativeExecutor)

    def held(weight: Weight) -> int:
        if in_native and weight.key in weights.formats:
            return weights.stored(weight.key).nbytes
        return 4 * math.prod(weight.sizes)

    return sum(held(weight) * read // of for weight, read, of in _reads(graph))


def _reads(graph: Graph) -> Iterator[tuple[Weight, int, int]]:
    """Every use of a weight, with the share of it that one token reads: so many out of so many."""
    for node in graph.nodes:
        for weight in node.weights:
            if node.op == "embed":
                yield weight, 1, weight.sizes[0]
            elif node.op == "linear" and node.params["experts"] is not None:
                yield weight, graph.values[node.inputs[1]].shape[-1].size or 1, weight.sizes[0]
            else:
                yield weight, 1, 1


def peak_memory() -> int | None:
    """The most memory, in bytes, that was resident at once in this process; None where the system does not say."""
    try:  # getrusage on Linux counts what the parent had before it started this program
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def process_age() -> float | None:
    """Seconds since this process started; None where the system does not say."""
    try:
        with open("/proc/self/stat") as file:
            started = int(file.read().rpartition(")")[2].split()[19])  # field 22, in ticks since the machine started
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
