"""The step loop: schedules, limits, aborts, sampling; blocks always come home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferflow.errors import ArgumentError, InferflowError, UnsupportedError
from inferflow.runtime.blocks import BlockPool
from inferflow.runtime.engine import Engine, Options
from inferflow.runtime.executor import ReferenceExecutor
from inferflow.runtime.model import Model, load_model
from inferflow.runtime.sampler import SamplingParams
from tests.tiny import write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write(tmp_path_factory.mktemp("tiny")))


def engine(model: Model, max_len: int = 64, slots: int = 8, **options: Any) -> Engine:
    executor = ReferenceExecutor(model.graph, model.weights)
    return Engine(model.graph, executor, max_len=max_len, slots=slots, options=Options(**options))


def test_long_prompts_are_cut_and_short_ones_composed(model: Model) -> None:
    e = engine(model, budget=8)
    long, short = e.add(list(range(20)), SamplingParams(max_tokens=2)), e.add([1, 2, 3], SamplingParams(max_tokens=5))
    assert [(s is long, n) for s, n in e.scheduler.schedule()] == [(True, 6), (False, 2)]
    steps = 0
    while e.waiting or e.running:
        e.step()
        steps += 1
    assert (len(long.ids), len(short.ids)) == (22, 8)
    assert steps == 6  # 6+2, 7+1, 7 and a decode, then both decode; the short one has two more to come
    assert sorted(e.pool.free) == list(range(e.pool.blocks))


def test_decoding_goes_first(model: Model) -> None:
    e = engine(model, budget=4)
    first = e.add([5], SamplingParams(max_tokens=8, ignore_eos=True))
    e.step()
    second = e.add(list(range(12)), SamplingParams(max_tokens=1))
    assert [(s is first, n) for s, n in e.scheduler.schedule()] == [(True, 1), (False, 3)]
    assert second in e.running


def test_more_sequences_than_room_wait_their_turn(model: Model) -> None:
    e = engine(model, slots=1, max_len=32)
    sequences = [e.add([n + 3] * 10, SamplingParams(max_tokens=20, ignore_eos=True)) for n in range(4)]
    e.step()
    assert (len(e.running), len(e.waiting)) == (1, 3)
    list(e.run())
    assert all(len(s.ids) == 30 and s.finish == "length" for s in sequences)


def test_abort_is_idempotent_and_returns_the_blocks(model: Model) -> None:
    e = engine(model)
    a, b = e.add([3, 4, 5], SamplingParams()), e.add([6], SamplingParams(max_tokens=3, ignore_eos=True))
    e.step()
    for _ in range(2):
        e.abort(a)
    list(e.run())
    assert len(b.ids) == 4
    assert len(e.pool.free) == e.pool.blocks


@pytest.mark.parametrize(
    ("ids", "params", "word"),
    [
        ([], {}, "no tokens"),
        ([67], {}, "not in the vocabulary"),
        ([-1], {}, "not in the vocabulary"),
        ([1] * 64, {}, "do not fit"),
        ([1] * 60, {"max_tokens": 5}, "do not fit"),
    ],
)
def test_what_can_never_run_is_refused(model: Model, ids: list[int], params: dict[str, int], word: str) -> None:
    e = engine(model)
    with pytest.raises(ArgumentError, match=word) as caught:
        e.add(ids, SamplingParams(**params))
    assert caught.value.fix
    list(e.run())
    assert e.add([3], SamplingParams(max_tokens=1)).finish is None


def test_an_end_token_ends(model: Model) -> None:
    free = engine(model)
    sequence = free.add([9, 10], SamplingParams(max_tokens=12))
    list(free.run())
    third = sequence.ids[4]
    e = Engine(model.graph, ReferenceExecutor(model.graph, model.weights), max_len=64, eos=[third])
    ended = e.add([9, 10], SamplingParams(max_tokens=12))
    going = e.add([9, 10], SamplingParams(max_tokens=12, ignore_eos=True))
    list(e.run())
    assert ended.finish == "stop"
    assert ended.ids == sequence.ids[: sequence.ids.index(third, 2) + 1]
    assert going.ids == sequence.ids


def test_block_pool_never_gives_twice() -> None:
    pool = BlockPool(5)
    a, b = pool.take(3), pool.take(2)
    assert sorted(a + b) == list(range(5))
    with pytest.raises(UnsupportedError, match="0 free blocks"):
        pool.take(1)
    pool.give(a)
    with pytest.raises(AssertionError):
        pool.give(a)


def test_sampled_answers_do_not_depend_on_company(model: Model) -> None:
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=11, max_tokens=10, ignore_eos=True)
    alone = engine(model)
    want = alone.add([4, 5, 6], params)
    list(alone.run())
    e = engine(model, budget=5)
    e.add(list(range(3, 20)), SamplingParams(temperature=0.7, max_tokens=9))
    got = e.add([4, 5, 6], params)
    e.step()
    e.add([8], SamplingParams(temperature=0.7, max_tokens=9))
    list(e.run())
    assert got.ids == want.ids


KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.2, "top_k": 9, "logprobs": 2},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 3.0}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"dry_multiplier": 1.0}, {"fsd_alpha": 0.6}, {"temperature": 1.0, "typical_p": 0.8},
    {"logit_bias": {9: 4}, "min_tokens": 5},
]  # fmt: skip


def test_events_carry_log_probabilities(model: Model) -> None:
    e = engine(model)
    e.add([4, 5, 6], SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True))
    events = list(e.run())
    assert len(events) == 3
    for event in events:
        assert event.logprob is not None
        assert event.logprob < 0
        assert event.top[0] == (event.token, event.logprob)  # greedy
        assert event.top[0][1] >= event.top[1][1]


def test_every_kind_of_sampling_is_the_same_in_company(model: Model) -> None:
    params = [SamplingParams(seed=3, max_tokens=9, **options) for options in KINDS]
    want = []
    for p in params:
        alone = engine(model)
        sequence = alone.add([4, 5, 6, 4, 5], p)
        list(alone.run())
        want.append(sequence.ids)
    together = engine(model, budget=7, slots=6)
    sequences = [together.add([4, 5, 6, 4, 5], p) for p in params]
    list(together.run())
    assert [s.ids for s in sequences] == want


def test_answers_of_one_seed_differ_by_their_index(model: Model) -> None:
    e = engine(model)
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=12, ignore_eos=True)
    sequences = [e.add([4, 5], params, index) for index in (0, 0, 1, 2)]
    list(e.run())
    assert sequences[0].ids == sequences[1].ids
    assert len({tuple(s.ids) for s in sequences}) == 3


def test_stop_ids_end_and_ids_beyond_the_vocabulary_are_refused(model: Model) -> None:
    e = engine(model)
    going = e.add([9, 10], SamplingParams(max_tokens=12, ignore_eos=True))
    list(e.run())
    third = going.ids[4]
    ended = e.add([9, 10], SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[third]))
    list(e.run())
    assert (ended.finish, ended.ids) == ("stop", going.ids[: going.ids.index(third, 2) + 1])
    with pytest.raises(ArgumentError, match="not in the vocabulary"):
        e.add([9], SamplingParams(logit_bias={67: 1.0}))


class Alternating:
    """Even and odd tokens by turns; token 13 is one that it does not take after all."""

    def __init__(self) -> None:
        self.turn = 0

    def mask(self) -> np.ndarray:
        return np.arange(67) % 2 == self.turn

    def push(self, token: int) -> None:
        if token == 13:
            raise InferflowError("13 brings bad luck", where="structure")
        self.turn = 1 - self.turn


def test_a_constraint_is_kept_and_fails_its_own_sequence_only(model: Model) -> None:
    e = engine(model)
    kept = e.add([9], SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={13: -100}), constraint=Alternating())
    fails = e.add([9], SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={13: 100}), constraint=Alternating())
    events = []
    while e.waiting or e.running:
        events += e.step()
    assert [token % 2 for token in kept.ids[1:]] == [0, 1] * 4
    assert [event.sequence for event in events if event.error is not None] == [fails]
    assert (fails.finish, len(e.pool.free)) == ("error", e.pool.blocks)


def test_corrupt_weights_are_said(tmp_path: Path) -> None:
    from tests.tiny import tensors

    bad = tensors()
    bad["model.norm.weight"][:] = np.nan
    broken = load_model(write(tmp_path, weights=bad))
    e = engine(broken)
    e.add([3], SamplingParams(max_tokens=1))
    with pytest.raises(InferflowError, match="no finite logits") as caught:
        list(e.run())
    assert "cache" not in caught.value.fix
