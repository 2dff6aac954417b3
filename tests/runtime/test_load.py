"""Load: lengths and arrivals of a seed, figures of hand-made traces, and the driver on a clock that only its steps move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inferflow.errors import ArgumentError, InferflowError
from inferflow.runtime.engine import Engine
from inferflow.runtime.load.compare import compare, medians
from inferflow.runtime.load.drive import drive, engines, loop
from inferflow.runtime.load.record import SLA, Record, moving_averages, report
from inferflow.runtime.load.workload import Lengths, Request, Workload, workload

from .mock import VOCAB, MockExecutor, alone, check, mock_engine


class Clock:
    """Seconds pass when it sleeps, and one with each step of the engine."""

    def __init__(self, engine: Engine) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        run = engine.executor.run
        engine.executor.run = lambda *a: (self.sleep(1.0), run(*a))[1]  # type: ignore[method-assign]
        self.slept.clear()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def driven(engine: Engine, load: Workload) -> list[Record]:
    clock = Clock(engine)
    return drive(engine, load, clock=clock, sleep=clock.sleep)


# ---------------------------------------------------------------------- lengths and arrivals


def test_lengths_are_as_they_are_called() -> None:
    rng = np.random.default_rng(1)
    assert Lengths.parse("fixed:7").draw(rng, 3) == [7, 7, 7]
    normal = Lengths.parse("normal:1000:300").draw(rng, 4000)
    assert abs(np.mean(normal) - 1000) < 20
    assert abs(np.std(normal) - 300) < 15
    assert (min(normal) >= 1, max(normal) <= 1900) == (True, True)
    assert min(Lengths.parse("normal:2:5").draw(rng, 400)) == 1
    uniform = Lengths.parse("uniform:3:6").draw(rng, 400)
    assert {n: uniform.count(n) > 60 for n in set(uniform)} == dict.fromkeys([3, 4, 5, 6], True)


def test_a_pareto_tail_is_heavy_and_has_bounds() -> None:
    lengths = Lengths.parse("pareto:1:4:512")
    drawn = lengths.draw(np.random.default_rng(2), 20000)
    assert (min(drawn), max(drawn) <= 512, lengths.longest) == (4, True, 512)
    for n in (8, 64, 256):  # P(length >= n) of the bounded distribution with shape 1
        want = (4 / n - 4 / 512) / (1 - 4 / 512)
        assert np.mean(np.array(drawn) >= n) == pytest.approx(want, abs=0.01)


@pytest.mark.parametrize(
    "text",
    ["", "fixed", "fixed:0", "fixed:2.5", "fixed:x", "fixed:1:2", "fixed:inf", "normal:0:1", "normal:9:-1", "normal:9",
     "uniform:5:4", "uniform:0:4", "pareto:0:1:9", "pareto:1:9:9", "pareto:nan:1:9", "zipf:3", "fixed:9999999"],
)  # fmt: skip
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="are no lengths"):
        Lengths.parse(text)


def test_a_misspelt_kind_is_named() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'pareto'"):
        Lengths.parse("paretto:1:2:3")
    with pytest.raises(ArgumentError) as caught:
        Lengths.parse("pareto:1")
    assert caught.value.fix == "write pareto:SHAPE:LOW:HIGH"


def test_a_workload_follows_from_its_seed() -> None:
    fixed, lengths = Lengths.parse("fixed:5"), Lengths.parse("uniform:1:9")
    make = lambda **more: workload(2000, lengths, fixed, ids=range(3, 9), **more)  # noqa: E731
    a, b, other = make(seed=[1, 2], rate=4.0), make(seed=[1, 2], rate=8.0), make(seed=[1, 3], rate=4.0)
    assert a == make(seed=[1, 2], rate=4.0) != other
    assert [r.prompt for r in a.requests] == [r.prompt for r in b.requests]
    assert [r.at for r in a.requests] == pytest.approx([2 * r.at for r in b.requests])
    assert {i for r in a.requests for i in r.prompt} == {*range(3, 9)}
    gaps = np.diff([r.at for r in a.requests])
    assert a.requests[0].at == 0
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.15)  # of an exponential distribution it is the mean
    closed = make(seed=0, clients=3)
    assert (closed.clients, {r.at for r in closed.requests}) == (3, {0.0})


# ---------------------------------------------------------------------- figures


def test_the_moving_average_is_that_of_pandas() -> None:
    """``pandas.Series([1, 2, 4, 8]).ewm(span=3).mean()``: weights 1, 1/2, 1/4, …, that sum to 1."""
    assert moving_averages([1, 2, 4, 8], span=3) == pytest.approx([1, 5 / 3, 3, 17 / 3])
    assert moving_averages([0.5] * 40) == pytest.approx([0.5] * 40)
    rising = moving_averages([0.0] * 1000 + [1.0])
    assert rising[-1] == pytest.approx(2 / 17)


def test_the_agreement_is_of_the_first_token_and_of_every_average() -> None:
    sla = SLA(prompt=100.0, output=4.0)
    steady = [2.0 + 0.25 * n for n in range(30)]
    assert Record(0.0, 200, steady).meets(sla)
    assert not Record(0.0, 199, steady).meets(sla)  # 2 s are too long for 199 tokens
    assert Record(0.0, 200, [2.0]).meets(sla)
    assert not Record(0.0, 200, [2.0, 2.26]).meets(sla)
    fast = [0.01 * n for n in range(100)]
    late = [t + (0.0 if n < 60 else 2.0) for n, t in enumerate(fast)]  # one gap of 2.01 s: 0.246 on average
    assert Record(0.0, 200, late).meets(sla)
    later = [t + (0.0 if n < 60 else 2.1) for n, t in enumerate(fast)]  # 0.258
    assert not Record(0.0, 200, later).meets(sla)
    early = [t + (0.0 if n < 3 else 2.0) for n, t in enumerate(fast)]  # the same gap, of few
    assert not Record(0.0, 200, early).meets(sla)
    assert not Record(0.0, 200, [1.0], error="it failed").meets(sla)


def test_figures_of_a_trace() -> None:
    records = [
        Record(1.0, 10, [2.0, 3.0, 5.0]),
        Record(1.5, 30, [2.0, 2.5], counted=4),
        Record(3.0, 20, [], error="no"),
        Record(4.0, 20, [5.0]),
    ]
    figures = report(records, SLA(prompt=15.0, output=1.0))
    assert (figures["requests"], figures["failed"], figures["seconds"]) == (4, 1, 4.0)
    rates = [figures[f"{name}_per_s"] for name in ("requests", "effective_requests", "output_tokens", "tokens")]
    assert rates == [0.75, 0.5, 2.0, 17.0]  # the first took 1 s for 10 tokens, where 0.67 s were asked
    assert figures["ttft_s"] == pytest.approx({"mean": 2.5 / 3, "p50": 1.0, "p95": 1.0, "p99": 1.0})
    assert figures["gap_s"] == pytest.approx({"mean": 3.5 / 3, "p50": 1.0, "p95": 1.9, "p99": 1.98})
    assert figures["end_to_end_s"] == pytest.approx({"mean": 2.0, "p50": 1.0, "p95": 3.7, "p99": 3.94})
    a_token = {"mean": (4 / 3 + 1 / 4 + 1) / 3, "p50": 1.0, "p95": 1.3, "p99": 1 + 0.98 / 3}
    assert figures["normalised_s"] == pytest.approx(a_token)


def test_figures_of_nothing() -> None:
    figures = report([Record(1.0, 10, error="no")], SLA())
    assert (figures["failed"], figures["requests_per_s"], figures["gap_s"]["p95"]) == (1, 0.0, None)


def test_medians_go_figure_by_figure() -> None:
    runs = [{"a": n, "b": {"c": c}} for n, c in ((3, 1.0), (1, None), (2, 2.0))]
    assert medians(runs) == {"a": 2, "b": {"c": None}}


# ---------------------------------------------------------------------- the driver


def test_an_open_loop_waits_for_arrivals_and_not_for_answers() -> None:
    engine = mock_engine(16)
    requests = (Request((1, 2), 3, 0.0), Request((3,), 2, 1.5), Request((4,), 1, 9.0))
    records = driven(engine, Workload(requests))
    # steps end at 1, 2, 3; the second arrives in the midst of the second step, and the last after a pause
    assert [r.arrival for r in records] == [0.0, 1.5, 9.0]
    assert [r.times for r in records] == [[1.0, 2.0, 3.0], [3.0, 4.0], [10.0]]
    assert [r.prompt for r in records] == [2, 1, 1]
    check(engine)


def test_it_sleeps_until_the_next_arrival() -> None:
    engine = mock_engine(16)
    clock = Clock(engine)
    drive(engine, Workload((Request((1,), 1, 0.5), Request((1,), 1, 4.0))), clock=clock, sleep=clock.sleep)
    assert clock.slept == [0.5, 1.0, 2.5, 1.0]


def test_in_a_closed_loop_the_next_comes_when_one_has_ended() -> None:
    engine = mock_engine(16)
    sizes = (1, 3, 2, 1)
    records = driven(engine, Workload(tuple(Request((n,), n) for n in sizes), clients=2))
    assert [(r.arrival, r.ended) for r in records] == [(0.0, 1.0), (0.0, 3.0), (1.0, 3.0), (3.0, 4.0)]
    widths = [len(batch.spans) for batch in engine.executor.steps]  # type: ignore[attr-defined]
    assert widths == [2, 2, 2, 1]


def test_answers_are_those_of_each_alone() -> None:
    engine = mock_engine(64)
    lengths = Lengths.parse("uniform:1:9")
    drawn = workload(12, lengths, lengths, ids=range(VOCAB), seed=0, rate=0.5)
    load = Workload(tuple(replace(r, at=round(r.at * 8) / 8) for r in drawn.requests))  # times that add up exactly
    ended: list[Any] = []
    end = engine.end
    engine.end = lambda s, f: (ended.append(s), end(s, f))[1]  # type: ignore[method-assign]
    records = driven(engine, load)
    assert [len(r.times) for r in records] == [r.output for r in load.requests]
    answers = {tuple(s.ids[: s.prompt]): s.ids for s in ended}
    assert all(answers[r.prompt] == alone(list(r.prompt), r.output) for r in load.requests)


def test_what_is_refused_has_an_error_and_the_others_an_answer() -> None:
    engine = mock_engine(16)
    records = driven(engine, Workload((Request((1,), 50), Request((VOCAB,), 1), Request((1,), 2)), clients=1))
    assert [r.error is None for r in records] == [False, False, True]
    assert "do not fit" in str(records[0].error)
    assert records[2].times == [1.0, 2.0]


def test_what_runs_is_aborted_when_the_driver_is_stopped() -> None:
    engine = mock_engine(16)

    def stop() -> float:
        if len(engine.executor.steps) > 1:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        drive(engine, Workload((Request((1,), 9), Request((2,), 9))), clock=stop)
    assert (engine.running, engine.waiting) == ([], [])
    check(engine)


# ---------------------------------------------------------------------- comparing


def test_drivers_take_turns_with_the_same_load() -> None:
    calls: list[tuple[str, Workload]] = []

    def driver(name: str, seconds: float) -> Any:
        def run(load: Workload) -> list[Record]:
            calls.append((name, load))
            return [Record(0.0, len(r.prompt), [seconds * len(r.prompt)]) for r in load.requests]

        return run

    loads = [Workload((Request((0,) * (n + 1), 1),)) for n in range(3)]
    told: list[None] = []
    tell = lambda: told.append(None)  # noqa: E731
    runs = compare({"a": driver("a", 1.0), "b": driver("b", 2.0)}, loads.__getitem__, 3, SLA(), tell)
    assert calls == [(name, load) for load in loads for name in "ab"]
    assert [r["seconds"] for r in runs["b"]] == [2.0, 4.0, 6.0]
    assert medians(runs["a"])["ttft_s"]["p50"] == 2.0
    assert len(told) == 6


def test_a_run_without_any_answer_is_an_error() -> None:
    refuse = lambda load: [Record(0.0, 1, error="it is full")]  # noqa: E731
    with pytest.raises(InferflowError, match="no request was answered: it is full"):
        compare({"a": refuse}, lambda n: Workload(()), 1, SLA())


def test_every_loop_has_an_engine_and_all_have_the_same_room() -> None:
    graph = mock_engine(1).graph
    loops = {name: loop(name, budget=8, width=2) for name in ("fcfs", "prefill-first", "static")}
    made = engines(graph, MockExecutor, loops, 12)  # type: ignore[arg-type]
    assert {name: engine.pool.blocks for name, engine in made.items()} == dict.fromkeys(loops, 3 * 32)
    assert len({id(engine.executor) for engine in made.values()}) == 3
    assert [made[name].options.prefill_first for name in loops] == [False, True, False]
    assert made["static"].options.policy == "static"
    assert [e.pool.blocks for e in engines(graph, MockExecutor, loops, 12, 7).values()] == [7] * 3  # type: ignore[arg-type]
