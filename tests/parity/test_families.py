"""Every family against transformers, and against itself: whole, token by token, in sevens, in a batch, streamed."""

from __future__ import annotations

import numpy as np
import pytest

from inferflow.runtime.engine import Engine
from inferflow.runtime.executor import ReferenceExecutor
from inferflow.runtime.model import choose_spec, load_model
from inferflow.runtime.sampler import SamplingParams
from inferflow.weights.check import check_spec
from inferflow.weights.open import open_source

from .oracle import oracle
from .table import ROWS, Row

TOLERANCE = 1e-4


def engine_for(row: Row, **options: int) -> Engine:
    folder, ids, _ = oracle(row)
    model = load_model(folder)
    return Engine(model.graph, ReferenceExecutor(model.graph, model.weights), max_len=2 * len(ids) + 16, **options)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_family(row: Row) -> None:
    _, ids, want = oracle(row)
    engine = engine_for(row)
    whole = engine.forward(ids)["logits"]
    assert np.abs(want).max() > 0.3, "the random model says nothing: its logits are too small to tell a fault"
    assert np.abs(whole - want).max() <= TOLERANCE
    for chunk in (1, 7, 64):
        np.testing.assert_array_equal(engine.forward(ids, chunk=chunk)["logits"], whole)
    assert len(engine.pool.free) == engine.pool.blocks
    check_batching(row, ids)
    source = open_source(oracle(row)[0])
    spec, config = choose_spec(source, None, source.config)
    assert [str(problem) for problem in check_spec(spec, config, source)] == []


def check_batching(row: Row, ids: list[int]) -> None:
    """Greedy answers alone and beside others that join late, with another token budget: the same tokens."""
    prompts = [ids, ids[3:20], ids[::-1][:9], ids[5:6]]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    alone = []
    for prompt in prompts:
        engine = engine_for(row)
        sequence = engine.add(prompt, params)
        list(engine.run())
        alone.append(sequence.ids)
    engine = engine_for(row, budget=11, slots=3)
    sequences = [engine.add(p, params) for p in prompts[:2]]
    engine.step()
    sequences += [engine.add(p, params) for p in prompts[2:]]
    list(engine.run())
    assert [s.ids for s in sequences] == alone
    assert len(engine.pool.free) == engine.pool.blocks
