"""A model of a few integers behind the executor's interface, and the invariants of the loop that runs it.

What it keeps of a token is the token itself, so the next one can be made from all of the prefix as the block table has it: a
block that is lost, doubly owned, stale or in the wrong place gives another answer than the sequence alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Many
from types import SimpleNamespace
from typing import Any

import numpy as np

from inferflow.runtime.batch import StepBatch
from inferflow.runtime.engine import Engine, Options

VOCAB = 11
BLOCK = 4


def following(prefix: Many[int]) -> int:
    """The token after `prefix`."""
    return zlib.crc32(np.asarray(prefix, np.int64).tobytes()) % VOCAB


def alone(prompt: list[int], new: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new):
        ids.append(following(ids))
    return ids


class MockExecutor:
    """`recurrent`: the model has a state as well, a checksum of all tokens before, which goes into the answer."""

    block_size = BLOCK
    pool = None
    block_bytes = 8 * BLOCK

    def __init__(self, sequences: int = 64, recurrent: bool = False) -> None:
        self.sequences = sequences
        self.recurrent = recurrent
        self.steps: list[StepBatch] = []

    def cache(self, blocks: int) -> Any:
        states = {0: np.full((self.sequences, 1), -1, np.int64)} if self.recurrent else {}
        keys = np.full((blocks, BLOCK), -1, np.int64)
        return SimpleNamespace(kind="f32", sequences=self.sequences, arrays=[keys], states=states)

    def run(self, batch: StepBatch, cache: Any) -> np.ndarray:
        self.steps.append(batch)
        keys = cache.arrays[0]
        written: set[tuple[int, int]] = set()
        for span in batch.spans:
            for n in range(span.start, span.start + span.count):
                block, at = span.blocks[batch.positions[n] // BLOCK], int(batch.positions[n] % BLOCK)
                assert (block, at) not in written, "two sequences write to one place"
                written.add((block, at))
                keys[block, at] = batch.tokens[n]
        logits = np.zeros((len(batch.rows), VOCAB), np.float32)
        for span in batch.spans:
            tokens = keys[list(span.blocks)].reshape(-1)
            if self.recurrent:
                for slot in cache.states.values():
                    before = int(slot[span.slot, 0]) if span.past else 0
                    assert before == zlib.crc32(tokens[: span.past].tobytes()), "the state of another sequence"
                    slot[span.slot] = zlib.crc32(tokens[: span.past + span.count].tobytes())
            for n in range(span.start, span.start + span.count):
                for row in np.flatnonzero(batch.rows == n):
                    logits[row, following(tokens[: batch.positions[n] + 1])] = 1
        return logits

    def capture(self, batch: StepBatch, cache: Any, names: Many[str]) -> dict[str, np.ndarray]:
        raise AssertionError("nobody asks for it")


def mock_engine(
    blocks: int, *, max_len: int = 32, sequences: int = 64, recurrent: bool = False, **options: Any
) -> Engine:
    graph: Any = SimpleNamespace(vocab=VOCAB, nodes=())
    clock = options.pop("clock", lambda: 0.0)
    executor = MockExecutor(sequences, recurrent)
    return Engine(graph, executor, max_len=max_len, blocks=blocks, options=Options(**options), clock=clock)


def check(engine: Engine) -> None:
    """Every block is free or counted as often as it is referred to; every sequence is in one place; nothing is known that is
    not there."""
    pool, scheduler = engine.pool, engine.scheduler
    references = [0] * pool.blocks
    for sequence in engine.running:
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        for block in sequence.blocks:
            references[block] += 1
        assert scheduler.blocks_for(sequence.past) <= len(sequence.blocks)
        assert 0 <= sequence.past < len(sequence.ids) <= sequence.limit
        assert sequence.finish is None
    assert references == pool.references
    assert set(pool.free) == {block for block in range(pool.blocks) if not references[block]}
    slots = [s.slot for s in engine.running]
    assert sorted([*slots, *scheduler.slots]) == list(range(engine.cache.sequences))
    keys = [scheduler.key(s) for s in engine.waiting]
    assert keys == sorted(set(keys))
    assert scheduler.waiting_tokens == sum(len(s.ids) for s in engine.waiting)
    for sequence in engine.waiting:
        assert (sequence.slot, sequence.blocks, sequence.finish) == (None, [], None)
        assert sequence.past == 0 or sequence.saved
    assert {pool.digests[b]: b for b in pool.digests} == pool.known
    if scheduler.swap and scheduler.swap.process:
        used = [row for s in engine.waiting if s.saved for row in s.saved.rows]
        assert sorted([*used, *scheduler.swap.free]) == list(range(scheduler.swap.rows))


def check_step(engine: Engine, batch: StepBatch) -> None:
    """The budget and the width are kept; flat arrays agree with the spans."""
    assert 0 < len(batch.tokens) <= engine.options.budget
    assert len(batch.spans) <= (engine.options.width or engine.options.budget)
    assert sum(span.count for span in batch.spans) == len(batch.tokens)
