"""Thousands of random histories of the loop: no block leaks or has two owners, every sequence ends, and each has the answer
that it has alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from inferflow.runtime.engine import Engine, Sequence
from inferflow.runtime.policies import POLICIES, MultiLevelFeedbackQueue
from inferflow.runtime.sampler import SamplingParams

from .mock import VOCAB, MockExecutor, alone, check, check_step, mock_engine

PATIENCE = 12
POLICY = st.sampled_from(
    [*POLICIES, MultiLevelFeedbackQueue(quantum=2.0, prompt_cost=0.5, levels=3, patience=PATIENCE)]
)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)  # two tokens: prompts have prefixes in common


@dataclass
class Live:
    """A request of a history, and the answer it must have."""

    sequence: Sequence
    want: list[int]


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "blocks": draw(st.integers(8, 24)),
        "sequences": draw(st.integers(2, 12)),
        "recurrent": draw(st.booleans()),
        "budget": draw(st.integers(1, 24)),
        "width": draw(st.none() | st.integers(1, 6)),
        "policy": draw(POLICY),
        "prefill_first": draw(st.booleans()),
        "prefix_cache": draw(st.booleans()),
        "swap_bytes": draw(st.sampled_from([0, 32 * 4, 32 * 100])),
    }


class History:
    """An engine that is driven at random and checked after everything that happens."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.now = 0.0
        self.engine: Engine = mock_engine(clock=lambda: self.now, **setup)
        self.live: list[Live] = []
        self.steps = 0

    def add(self, prompt: list[int], new: int, priority: int, deadline: int | None, salt: int) -> None:
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        sequence = self.engine.add(
            prompt, params, priority=priority, deadline=None if deadline is None else self.now + deadline,
            extras={"cache_salt": salt},
        )  # fmt: skip
        self.live.append(Live(sequence, alone(prompt, new)))

    def fork(self, which: int) -> None:
        if self.live:
            parent = self.live[which % len(self.live)].sequence
            child = self.engine.fork(parent, 1)
            self.live.append(Live(child, alone(parent.ids[: parent.prompt], parent.limit - parent.prompt)))

    def branch(self, which: int, token: int) -> None:
        """As a beam: all that the parent has but the last token, and another in its place."""
        if self.live:
            parent = self.live[which % len(self.live)].sequence
            ids = [*parent.ids[:-1], token]
            self.live.append(Live(self.engine.fork(parent, 2, ids), alone(ids, parent.limit - len(ids))))

    def abort(self, which: int) -> None:
        if self.live:
            gone = self.live.pop(which % len(self.live)).sequence
            for _ in range(2):
                self.engine.abort(gone)
                check(self.engine)
            assert gone.finish == "abort"

    def step(self) -> None:
        executor = self.engine.executor
        assert isinstance(executor, MockExecutor)
        ran = len(executor.steps)
        events = self.engine.step()
        self.now += 1
        self.steps += 1
        assert len(executor.steps) == ran + bool(self.live), "there is work, and nothing runs"
        if self.live:
            check_step(self.engine, executor.steps[-1])
        late = {id(e.sequence) for e in events if e.finish == "deadline"}
        for entry in [e for e in self.live if e.sequence.finish is not None]:
            self.live.remove(entry)
            got = entry.sequence.ids
            assert entry.sequence.finish == ("deadline" if id(entry.sequence) in late else "length")
            assert got == entry.want[: len(got)]
            assert id(entry.sequence) in late or len(got) == len(entry.want)
        check(self.engine)

    def finish(self) -> None:
        """A sequence that starts comes to a new token, whatever it costs to compute the others again: at most 32 steps."""
        bound = self.steps + 50 + sum(len(e.want) - len(e.sequence.ids) + 1 for e in self.live) * 34
        while self.live:
            self.step()
            assert self.steps <= bound, "a sequence starves"
        assert not self.engine.running
        assert not self.engine.waiting
        assert len(self.engine.pool.free) == self.engine.pool.blocks


@settings(max_examples=2000, deadline=None)
@given(setups(), st.data())
def test_random_histories(setup: dict[str, Any], data: st.DataObject) -> None:
    history = History(setup)
    number = st.integers(0, 50)
    actions = st.one_of(
        st.tuples(
            st.just("add"),
            TOKENS,
            st.integers(1, 12),
            st.integers(0, 2),
            st.none() | st.integers(0, 20),
            st.integers(0, 1),
        ),
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("fork"), number),
        st.tuples(st.just("branch"), number, st.integers(0, VOCAB - 1)),
        st.tuples(st.just("abort"), number),
    )
    for name, *arguments in data.draw(st.lists(actions, max_size=25)):
        getattr(history, name)(*arguments)
        check(history.engine)
    history.finish()


def test_what_was_begun_comes_to_a_token() -> None:
    """Found by the above: sequences threw out one another for ever, each before it had computed again what it lost."""
    queues = MultiLevelFeedbackQueue(quantum=2.0, prompt_cost=0.5, levels=3, patience=PATIENCE)
    history = History({"blocks": 8, "sequences": 2, "budget": 1, "policy": queues, "prefix_cache": False})
    for prompt, new in ((6, 9), (12, 12), (2, 11), (5, 4)):
        history.add([0] * prompt, new, 0, None, 0)
    history.finish()


def test_a_fork_writes_where_its_parent_made_way() -> None:
    """Found by the above: a full block was still known for what the parent had in it."""
    engine = mock_engine(3, policy=MultiLevelFeedbackQueue(quantum=1.0, levels=3))
    parent = engine.add([0] * 7, SamplingParams(max_tokens=5, ignore_eos=True))
    while parent.past < 9:
        engine.step()
    child = engine.fork(parent, 1, [*parent.ids[:6], 9])
    engine.step()
    assert (parent.slot, child.slot is None) == (None, False)
    check(engine)
    list(engine.run())
    assert (parent.ids, child.ids) == (alone([0] * 7, 5), alone([0] * 6 + [9], 5))


@pytest.mark.parametrize("recurrent", [False, True])
def test_what_was_swapped_leaves_its_rows(recurrent: bool) -> None:
    history = History({"blocks": 24, "sequences": 4, "swap_bytes": 32 * 8, "recurrent": recurrent})
    for _ in range(3):
        history.add([1] * 9, 5, 0, None, 0)
    history.step()
    for entry in history.live:
        history.engine.scheduler.preempt(entry.sequence)
    saved = [entry.sequence.saved is not None for entry in history.live]
    assert saved == [True, True, False]  # the file is full
    check(history.engine)
    history.abort(0)
    history.finish()


@pytest.mark.parametrize("policy", ["fcfs", MultiLevelFeedbackQueue(quantum=2.0, levels=3, patience=PATIENCE)])
def test_a_stream_of_newcomers_starves_nobody(policy: Any) -> None:
    """Short requests arrive for ever, two a step, of which the width takes one: a long one ends all the same."""
    history = History({"blocks": 24, "width": 2, "budget": 8, "policy": policy})
    history.add([1] * 16, 12, 0, None, 0)
    long = history.live[0].sequence
    gap = last = 0
    for n in range(600):
        if n < 200:
            history.add([n % 2], 1, 0, None, 0)
            history.add([n % 2, 1], 2, 0, None, 0)
        history.step()
        if long.finish is None:
            gap = max(gap, history.steps - max(long.last, last))
        elif not last:
            last = history.steps
    assert long.finish == "length"
    assert gap <= 2 * PATIENCE
    history.finish()
