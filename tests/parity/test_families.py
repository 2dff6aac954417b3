"""Every family against transformers, and against itself: whole, token by token, in sevens, alone, in a batch, streamed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inferflow import LLM
from inferflow.arguments import ENGINES
from inferflow.errors import ArgumentError
from inferflow.runtime.engine import Engine, Options
from inferflow.runtime.sampler import SamplingParams
from inferflow.weights.check import check_spec

from .oracle import oracle
from .table import ROWS, Row

TOLERANCE = 1e-4


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_family(row: Row) -> None:
    folder, ids, want = oracle(row)
    assert np.abs(want).max() > 0.3, "the random model says nothing: its logits are too small to tell a fault"
    for engine in ENGINES:
        with opened(folder, 2 * len(ids) + 16, engine) as llm:
            whole = llm.logits(ids)
            assert np.abs(whole - want).max() <= TOLERANCE, engine
            for chunk in (1, 7, 64):
                np.testing.assert_array_equal(llm.logits(ids, chunk=chunk), whole)
            check_batching(llm, ids)
            model = llm.model
    assert [str(problem) for problem in check_spec(model.spec, model.config, model.source)] == []


def opened(folder: Path, length: int, engine: str) -> LLM:
    """With room for `length` tokens, also beyond what the model was made for, unless a table of positions bounds it."""
    try:
        return LLM(folder, max_model_len=length, engine=engine)
    except ArgumentError:
        return LLM(folder, engine=engine)


def check_batching(llm: LLM, ids: list[int]) -> None:
    """Greedy answers alone, streamed, and beside others that join late, with another token budget: the same tokens."""
    prompts = [ids, ids[3:20], ids[::-1][:9], ids[5:6]]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    alone = [llm.generate([prompt], params)[0].ids for prompt in prompts]
    assert tuple(chunk.token for chunk in llm.stream(prompts[1], params)) == alone[1]
    engine = Engine(llm.model.graph, llm.executor(), max_len=llm.max_model_len, slots=3, options=Options(budget=11))
    sequences = [engine.add(p, params) for p in prompts[:2]]
    engine.step()
    sequences += [engine.add(p, params) for p in prompts[2:]]
    list(engine.run())
    assert [tuple(s.ids[s.prompt :]) for s in sequences] == alone
    assert len(engine.pool.free) == engine.pool.blocks
