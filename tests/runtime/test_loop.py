"""What the loop promises one by one: bounds, deadlines, order, shares, and what is said about memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from inferflow.errors import ArgumentError, DeadlineError, QueueFullError
from inferflow.runtime import engine as engine_module
from inferflow.runtime.blocks import BlockPool, chain, root
from inferflow.runtime.engine import Engine, Options, Sequence
from inferflow.runtime.memory import free_memory, plan_memory
from inferflow.runtime.policies import MultiLevelFeedbackQueue
from inferflow.runtime.sampler import SamplingParams
from inferflow.runtime.sequence import Event

from .mock import alone, check, mock_engine


def ask(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, ignore_eos=True)


def order(engine: Engine) -> list[int]:
    """The numbers of the sequences in the order in which they end."""
    return [event.sequence.arrival for event in engine.run() if event.finish]


def test_a_digest_holds_tokens_parent_and_extras() -> None:
    """Python's own hash takes -1 and -2 for the same, and is 64 bits wide."""
    start = root({"cache_salt": "a"})
    seen = {chain(start, tokens) for tokens in ([-1], [-2], [1, 2], [2, 1], [258], [1, 1])}
    seen |= {chain(root(extras), [1, 2]) for extras in ({}, {"cache_salt": "b"}, {"adapter": "a"}, {"cache_salt": 1})}
    seen.add(chain(chain(start, [1]), [2]))
    assert len(seen) == 11
    assert root({"a": 1, "b": 2}) == root({"b": 2, "a": 1})


def test_the_least_recently_used_prefix_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(5)
    old, new = pool.take(2), pool.take(2)
    for name, block in zip("abcd", [*old, *new], strict=True):
        pool.remember(block, name.encode())
    pool.give(old)
    pool.give(new)
    assert pool.take(1) == [4]  # it holds nothing
    assert pool.find([b"a", b"b"]) == old
    assert pool.take(1) == [old[1]]
    assert pool.find([b"a", b"b"]) == [old[0]]
    pool.share(pool.find([b"a"]))  # used again
    pool.give([old[0]])
    assert [pool.take(1)[0] for _ in range(3)] == [new[1], new[0], old[0]]
    assert not pool.known


def test_decodes_go_on_beside_a_long_prompt() -> None:
    """And a short prompt gets its first token long before the long one."""
    engine = mock_engine(64, max_len=128, budget=5)
    a = engine.add([1], ask(60))
    engine.step()
    long = engine.add([2] * 100, ask(1))
    short = engine.add([3, 4], ask(1))
    for _ in range(2):
        assert short.finish is None
        engine.step()
    assert (short.finish, long.past) == ("length", 6)
    for _ in range(24):
        before = len(a.ids)
        engine.step()
        assert len(a.ids) == before + 1
    assert long.finish == "length"  # and nothing is left to others that are not there


def test_prompts_come_first_where_that_is_asked() -> None:
    engine = mock_engine(64, max_len=128, budget=5, prefill_first=True)
    a = engine.add([1], ask(60))
    engine.step()
    long = engine.add([2] * 20, ask(2))
    for _ in range(4):
        engine.step()
    assert (len(a.ids), len(long.ids)) == (2, 21)
    engine.step()
    assert len(a.ids) == 3


def test_policies_order() -> None:
    def ended(**options: Any) -> list[int]:
        engine = mock_engine(64, width=options.pop("width", 1), **options)
        for number, new in enumerate((13, 3, 6)):
            engine.add([1, 2], ask(new), priority=-number)
            engine.step()
        return order(engine)

    assert ended() == [0, 1, 2]
    assert ended(policy="priority") == [2, 1, 0]
    assert ended(policy=MultiLevelFeedbackQueue(quantum=3.0)) == [1, 2, 0]
    assert ended(policy="sequential", width=None) == [0, 1, 2]
    assert ended(policy="static", width=None) == [0, 1, 2]
    assert ended(width=None) == [1, 2, 0]


def test_long_prompts_join_a_lower_queue() -> None:
    queues = MultiLevelFeedbackQueue(quantum=2.0, prompt_cost=0.5, levels=3)
    engine = mock_engine(64, max_len=128, policy=queues)
    assert [engine.add([1] * n, ask(1)).level for n in (1, 4, 5, 8, 9, 100)] == [0, 0, 1, 1, 2, 2]


def test_a_static_batch_takes_nobody_in() -> None:
    engine = mock_engine(64, policy="static")
    first, second = engine.add([1], ask(2)), engine.add([2], ask(5))
    engine.step()
    late = engine.add([3], ask(1))
    while second.finish is None:
        assert late.past == 0
        engine.step()
    assert (first.finish, late.finish) == ("length", None)
    assert order(engine) == [2]


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    engine = mock_engine(64, width=1, max_waiting=2, max_waiting_tokens=20)
    for _ in range(2):
        engine.add([1] * 9, ask(1))
    with pytest.raises(QueueFullError, match="2 requests are waiting, of 2"):
        engine.add([1], ask(1))
    with pytest.raises(QueueFullError):
        engine.fork(engine.waiting[0], 1)
    engine.step()
    with pytest.raises(QueueFullError, match="9 tokens are waiting, of 20 that may, and 12 more"):
        engine.add([1] * 12, ask(1))
    engine.abort(engine.waiting[0])
    assert engine.add([1] * 30, ask(1)).finish is None  # alone it may be as long as it fits
    list(engine.run())
    assert engine.scheduler.waiting_tokens == 0


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = mock_engine(3)
    with pytest.raises(ArgumentError, match="13 tokens need 4 blocks of 4, and the cache has 3") as caught:
        engine.add([1] * 10, ask(3))
    assert caught.value.fix
    assert engine.add([1] * 10, ask(2)).ids == [1] * 10
    assert order(engine) == [0]


def test_deadlines_end_what_waits_and_what_runs() -> None:
    now = [0.0]
    engine = mock_engine(64, width=1, clock=lambda: now[0])
    running, waiting = engine.add([1], ask(20), deadline=3), engine.add([1], ask(20), deadline=2.5)
    patient = engine.add([1, 2], ask(3), deadline=99)
    events: list[Event] = []
    while engine.running or engine.waiting:
        now[0] += 1
        events += engine.step()
        check(engine)
    assert [running.finish, waiting.finish, patient.finish] == ["deadline", "deadline", "length"]
    assert len(running.ids) == 4
    late = [e for e in events if e.finish == "deadline"]
    assert [str(e.error) for e in late if isinstance(e.error, DeadlineError)] == [
        f"timeout: the time is up after {n} new tokens (allow more time, or lower max_tokens)" for n in (0, 3)
    ]
    assert patient.ids == alone([1, 2], 3)


def test_deadlines_of_many_short_requests_are_not_kept() -> None:
    engine = mock_engine(64)
    for _ in range(1000):
        engine.add([1], ask(1), deadline=1e9)
        engine.step()
    assert len(engine.deadlines) < 100


def test_an_aborted_prefix_is_known() -> None:
    engine = mock_engine(64)
    first = engine.add([1] * 20, ask(5))
    engine.step()
    engine.abort(first)
    second = engine.add([1] * 20, ask(5))
    engine.step()
    assert second.cached == 16
    totals = engine.scheduler.totals
    assert (totals.asked, totals.cached) == (40, 16)


@pytest.mark.parametrize("part", ["run", "sample"])
def test_a_step_that_raises_is_done_again(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    engine = mock_engine(8, budget=6)
    sequences = [engine.add([n] * 7, ask(6)) for n in range(3)]
    owner: Any = engine.executor if part == "run" else engine_module
    works = getattr(owner, part)
    failures = [True, False, False, True, True] * 20

    def failing(*args: Any) -> Any:
        if failures and failures.pop():
            raise KeyboardInterrupt
        return works(*args)

    monkeypatch.setattr(owner, part, failing)
    while engine.running or engine.waiting:
        try:
            engine.step()
        except KeyboardInterrupt:
            check(engine)
    assert [s.ids for s in sequences] == [alone([n] * 7, 6) for n in range(3)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no disk that is always full")
def test_where_the_disk_is_full_sequences_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: Any) -> Any:
        return open("/dev/full", "r+b", **options)

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    engine = mock_engine(64, swap_bytes=1 << 16)
    sequences = [engine.add([n] * 9, ask(8)) for n in range(3)]
    engine.step()
    for sequence in sequences[:2]:
        engine.scheduler.preempt(sequence)
        assert sequence.saved is None
    list(engine.run())
    assert [s.ids for s in sequences] == [alone([n] * 9, 8) for n in range(3)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_child_computes_again_what_its_parent_swapped() -> None:
    """The file is the parent's, who goes on to write to it."""
    engine = mock_engine(64, swap_bytes=1 << 16)
    sequences = [engine.add([n] * 9, ask(8)) for n in range(3)]
    engine.step()
    for sequence in sequences[:2]:
        engine.scheduler.preempt(sequence)

    def answers() -> bool:
        list(engine.run())
        check(engine)
        return [s.ids for s in sequences] == [alone([n] * 9, 8) for n in range(3)]

    child = os.fork()
    if child == 0:
        engine.scheduler.preempt(sequences[2])
        os._exit(0 if answers() else 1)
    assert answers()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_long_queue_does_not_slow_a_step() -> None:
    """Not a time, which another process can spoil, but how often ranks are looked at."""
    looked = [0]

    class Counting(MultiLevelFeedbackQueue):
        def key(self, sequence: Sequence) -> tuple[int, ...]:
            looked[0] += 1
            return super().key(sequence)

    counts = []
    for waiting in (10, 10_000):
        engine = mock_engine(64, width=4, policy=Counting())
        for _ in range(4):
            engine.add([1], ask(20))
        engine.step()
        for _ in range(waiting):
            engine.add([1], ask(20))
        looked[0] = 0
        engine.step()
        counts.append(looked[0])
        assert len(engine.waiting) >= waiting
    assert counts[1] <= counts[0] + 20


def test_what_is_said_about_memory() -> None:
    def plan(free: int | None, asked: int | None = None) -> tuple[int, str]:
        got = plan_memory(1000, 16, 64, 8, asked, free)
        return got.blocks, got.reason

    assert plan(None) == (32, "KV cache: 32 blocks of 16 tokens, 0.032 MB, for 8 sequences of 64 tokens")
    assert plan(1 << 30)[0] == 32
    scarce = (
        "KV cache: 15 blocks of 16 tokens, 0.015 MB, of 0.02 MB that are free; 32 would hold 8 sequences of 64 tokens"
    )
    assert plan(20_000) == (15, scarce)
    assert plan(0)[0] == 4  # one sequence in any case
    assert plan(0, 7) == (7, "KV cache: 7 blocks of 16 tokens, 0.007 MB, as asked")
    free = free_memory()
    assert free is None or free > 1 << 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget", 0),
        ("budget", None),
        ("width", 0),
        ("width", 1.5),
        ("swap_bytes", -1),
        ("max_waiting", True),
        ("policy", "lifo"),
    ],
)
def test_wrong_options(name: str, value: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        Options(**{name: value})  # type: ignore[arg-type]
    assert caught.value.where == name
    assert caught.value.fix
