"""Measuring, on a clock that only the work moves: rates, medians, order; bytes that a token reads; facts of the process."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inferflow.errors import InferflowError
from inferflow.graph.build import build_graph
from inferflow.runtime import measure as module
from inferflow.runtime.executor import ReferenceExecutor
from inferflow.runtime.measure import Sizes, engine_facts, measure, peak_memory, process_age, weight_bytes
from inferflow.runtime.model import Model, load_model
from inferflow.spec.library import load_spec
from tests.tiny import CONFIG, tensors, write


class Clock:
    """A step takes 10 ms and 1 ms a token; a recorded prefill of round n, n ms more."""

    def __init__(self, model: Model) -> None:
        self.now = 0.0
        self.steps: list[int] = []  # tokens of each
        self.executor = ReferenceExecutor(model.graph, model.weights)
        self.executor.run = self.run  # type: ignore[method-assign]
        self.vocab = model.graph.vocab
        self.prefills = 0
        self.bad = False

    def run(self, batch: Any, cache: Any) -> np.ndarray:
        self.steps.append(len(batch.tokens))
        self.now += 0.01 + 0.001 * len(batch.tokens)
        if len(batch.spans) == 1 and batch.spans[0].count == 50:
            self.now += 0.001 * self.prefills
            self.prefills += 1
        return np.full((len(batch.rows), self.vocab), np.nan if self.bad else 0, np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write(tmp_path_factory.mktemp("measure")))


@pytest.fixture
def clock(model: Model, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(model)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    probes = iter(range(10, 100))
    monkeypatch.setattr(module, "read_bandwidth", lambda executor: float(next(probes)))
    return clock


def test_rates_are_of_the_clock_and_medians_of_rounds(model: Model, clock: Clock) -> None:
    told: list[tuple[int, int]] = []
    sizes = Sizes(prefill=50, decode=6, batches=(1, 3))
    report = measure(model.graph, clock.executor, sizes, 3, lambda done, total: told.append((done, total)))
    runs = [round(50 / (0.06 + 0.001 * n), 3) for n in (1, 2, 3)]  # round 0 is not recorded
    assert report["prefill"] == {"tokens": 50, "tokens_per_s": runs[1], "runs": runs}
    assert [(row["sequences"], row["tokens"], row["tokens_per_s"]) for row in report["decode"]] == [
        (1, 6, round(1 / 0.011, 3)),
        (3, 6, round(3 / 0.013, 3)),
    ]
    assert (report["read_runs"], report["read_gb_per_s"]) == ([10, 11, 12, 13], 11.5)
    assert told == [(n, 12) for n in range(12)]
    assert report["peak_bytes"] > 10e6
    # a prompt of 50; prompts of 6 and then steps of one token a sequence, whose first tokens came with the prompts
    assert clock.steps == 4 * [50, 6, *6 * [1], 18, *6 * [3]]


def test_sequences_that_start_at_different_steps_are_measured_together(model: Model, clock: Clock) -> None:
    sizes = Sizes(prefill=1, decode=200, batches=(1, 7))
    report = measure(model.graph, clock.executor, sizes, 1)
    assert report["decode"][1]["tokens_per_s"] == round(7 / 0.017, 3)
    assert max(clock.steps) == module.BUDGET


def test_a_model_without_finite_logits_is_refused(model: Model, clock: Clock) -> None:
    clock.bad = True
    with pytest.raises(InferflowError, match="no finite logits"):
        measure(model.graph, clock.executor, Sizes(4, 4, (1,)), 1)


def test_a_token_reads_every_matrix_but_one_row_of_the_embedding(model: Model) -> None:
    executor = ReferenceExecutor(model.graph, model.weights)
    elements = sum(array.size for array in tensors().values()) - (CONFIG["vocab_size"] - 1) * CONFIG["hidden_size"]
    assert weight_bytes(model.graph, model.weights, executor) == 4 * elements
    assert engine_facts(executor) == {"engine": "reference", "isa": None, "threads": None, "kv": None}


def test_what_the_native_engine_holds_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tensors()
    model = load_model(write(tmp_path, CONFIG, {name: w.astype(np.float16) for name, w in weights.items()}))
    monkeypatch.setattr(module, "NativeExecutor", ReferenceExecutor)
    matrices = sum(w.size for w in weights.values() if w.ndim == 2) - 66 * 32
    vectors = sum(w.size for w in weights.values() if w.ndim == 1)
    executor = ReferenceExecutor(model.graph, model.weights)
    assert weight_bytes(model.graph, model.weights, executor) == 2 * matrices + 4 * vectors


def test_a_token_reads_the_experts_that_are_chosen(model: Model) -> None:
    config = {**CONFIG, "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2}
    graph = build_graph(load_spec("mixtral"), config, []).graph
    sizes = {weight.key: math.prod(weight.sizes) for weight in graph.weights.values()}
    experts = sum(size for key, size in sizes.items() if "_exps" in key)
    assert experts == 2 * 5 * 3 * 32 * 48
    rest = sum(sizes.values()) - experts - 66 * 32
    executor = ReferenceExecutor(model.graph, model.weights)
    assert weight_bytes(graph, model.weights, executor) == 4 * (rest + experts * 2 // 5)


def test_the_probe_reads_memory_at_a_credible_speed(model: Model) -> None:
    assert 0.05 < module.read_bandwidth(ReferenceExecutor(model.graph, model.weights)) < 2000


def test_facts_of_the_process() -> None:
    code = (
        "import time; from inferflow.runtime.measure import *; time.sleep(0.3); a = process_age(); time.sleep(0.2)\n"
        "print(a, process_age() - a, peak_memory()); x = b'x' * 100_000_000; print(peak_memory())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    age, more, before, after = map(float, out)
    assert 0.3 < age < 60
    assert 0.19 < more < 5
    assert after - before > 80e6
    assert (process_age() or 0) > 0
    assert (peak_memory() or 0) > 0
