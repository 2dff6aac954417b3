"""`AsyncLLM`: tasks, threads and loops on one model; what is left, cancelled or closed leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from inferflow import LLM, AsyncLLM, Completion, Options
from inferflow.async_llm import StepReport
from inferflow.errors import ArgumentError, ClosedError, DeadlineError, InferflowError, QueueFullError, TextError
from tests.tiny import CONFIG, write

PROMPTS = [[3 + n, 14, 15, 9 + n] * (1 + n % 3) for n in range(12)]
ASKED: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 4, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"max_tokens": 3900, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"), {**CONFIG, "max_position_embeddings": 4096})


@pytest.fixture(scope="module")
def want(folder: Path) -> list[Completion]:
    with LLM(folder) as llm:
        return [llm.generate([prompt], **ASKED)[0] for prompt in PROMPTS]


def trial(folder: Path, body: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    """Run `body` on a model; nothing may be left in it at the end."""

    async def run() -> None:
        async with AsyncLLM(folder, **options) as llm:
            await body(llm)
            await idle(llm)
            engine = llm.llm.engine
            assert len(engine.pool.free) == engine.pool.blocks
            assert sorted(engine.scheduler.slots) == list(range(len(engine.scheduler.slots)))

    asyncio.run(run())


async def idle(llm: AsyncLLM) -> None:
    """Wait until nothing runs: an abort takes effect within a step."""
    for _ in range(1000):
        if not llm.busy:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("something still runs")


def test_tasks_get_what_each_gets_alone(folder: Path, want: list[Completion]) -> None:
    async def body(llm: AsyncLLM) -> None:
        assert await asyncio.gather(*(llm.generate(prompt, **ASKED) for prompt in PROMPTS)) == want
        streamed = [chunk.token async for chunk in llm.stream(PROMPTS[5], **ASKED)]
        assert tuple(streamed) == want[5].ids

    trial(folder, body, options=Options(budget=9))


def test_threads_and_loops_share_one_model(folder: Path, want: list[Completion]) -> None:
    found: list[Any] = []

    async def body(llm: AsyncLLM) -> None:
        def other_loop() -> None:
            async def ask() -> list[Completion]:
                return list(await asyncio.gather(*(llm.generate(prompt, **ASKED) for prompt in PROMPTS)))

            found.append(asyncio.run(ask()))

        def plain() -> None:
            found.append([llm.llm.generate([prompt], **ASKED)[0] for prompt in PROMPTS])

        threads = [threading.Thread(target=target) for target in (other_loop, plain, plain)]
        for thread in threads:
            thread.start()
        found.append(list(await asyncio.gather(*(llm.generate(prompt, **ASKED) for prompt in PROMPTS))))
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])

    trial(folder, body)
    assert len(found) == 4
    assert all(one == want for one in found)


def test_what_nobody_waits_for_is_aborted(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        async for _ in llm.stream(PROMPTS[0], **ENDLESS):
            break
        await idle(llm)
        task = asyncio.ensure_future(llm.generate(PROMPTS[1], n=3, **ENDLESS))
        while not llm.llm.engine.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)
        request = await llm.start(PROMPTS[2], **ENDLESS)
        assert request.prompt_ids == tuple(PROMPTS[2])
        request.abort()
        request.abort()
        await idle(llm)
        request = await llm.start(PROMPTS[2], **ENDLESS)
        del request
        gc.collect()
        await idle(llm)

    trial(folder, body)


def test_who_waits_for_what_is_aborted_gets_what_has_come(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        request = await llm.start(PROMPTS[0], **ENDLESS)
        first = await anext(request)
        waiting = asyncio.create_task(request.result())
        await asyncio.sleep(0)
        await asyncio.to_thread(request.abort)
        whole = await asyncio.wait_for(waiting, 60)
        assert (whole.finish, whole.ids[0]) == ("abort", first.token)
        assert [chunk async for chunk in request] == []

    trial(folder, body)


def test_a_request_cancelled_before_it_is_admitted(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        with llm.llm.turn():  # nothing is admitted meanwhile
            tasks = [asyncio.ensure_future(llm.generate(prompt, **ENDLESS)) for prompt in PROMPTS]
            while len(llm._arrivals) < len(tasks) - 1:
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            assert {type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)} == {
                asyncio.CancelledError
            }
        await idle(llm)
        assert llm.llm.engine.scheduler.totals.decoded == 0

    trial(folder, body)


def test_a_request_cancelled_just_when_it_is_admitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is told to end after the admission and before it hears of it: the sequences end as well."""

    async def body(llm: AsyncLLM) -> None:
        loop, admit = asyncio.get_running_loop(), llm.llm.admit

        def admit_and_cancel(*args: Any) -> Any:
            made = admit(*args)
            loop.call_soon_threadsafe(task.cancel)
            return made

        monkeypatch.setattr(llm.llm, "admit", admit_and_cancel)
        task = asyncio.create_task(llm.start([3, 14, 15], **ENDLESS))
        with pytest.raises(asyncio.CancelledError):
            await task
        steps = llm.llm.engine.scheduler.totals.steps
        await idle(llm)
        assert llm.llm.engine.scheduler.totals.steps < steps + 1000

    trial(folder, body)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_forked_child_is_told_that_nothing_steps_there(folder: Path, want: list[Completion]) -> None:
    """Instead of waiting for ever; the model itself is of use there."""
    llm = AsyncLLM(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, which this is about
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(asyncio.run(_in_the_child(llm, want[0])))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncio.run(_answer(llm)) == want[0]


async def _in_the_child(llm: AsyncLLM, want: Completion) -> int:
    """0 if it is refused there, the model answers, and it can be closed."""
    try:
        await llm.generate(PROMPTS[0], **ASKED)
        return 1
    except ClosedError as error:
        if "forked" not in error.reason:
            return 2
    if llm.llm.generate([PROMPTS[0]], **ASKED)[0] != want:
        return 3
    await llm.close()
    return 0


async def _answer(llm: AsyncLLM) -> Completion:
    async with llm:
        return await llm.generate(PROMPTS[0], **ASKED)


def test_refused_before_anything_runs(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        for prompt, options, error, where in (
            ([], {}, ArgumentError, "prompt"),
            ([5] * 5000, {}, ArgumentError, "prompt"),
            ([67], {}, ArgumentError, "prompt"),
            (3, {}, ArgumentError, "prompt"),
            ([3], {"temperature": -1}, ArgumentError, "temperature"),
            ([3], {"no_such": 1}, ArgumentError, "no_such"),
            ([3], {"timeout": -1}, ArgumentError, "timeout"),
            ([3], {"timeout": 10**400}, ArgumentError, "timeout"),
            ("text", {}, TextError, str(folder)),
        ):
            with pytest.raises(error) as caught:
                await llm.start(prompt, **options)  # type: ignore[arg-type]
            assert caught.value.where == where
        assert llm.llm.engine.scheduler.totals.steps == 0

    trial(folder, body)


def test_full_queues_and_time_limits(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        running = await llm.start(PROMPTS[0], **ENDLESS)
        assert (await anext(running)).finish is None
        waiting = [await llm.start(PROMPTS[1], **ENDLESS) for _ in range(2)]
        with pytest.raises(QueueFullError):
            await llm.start(PROMPTS[1], **ENDLESS)
        for one in (running, *waiting):
            one.abort()
        await idle(llm)
        late = await llm.start(PROMPTS[0], timeout=0.02, **ENDLESS)
        with pytest.raises(DeadlineError):
            await late.result()

    trial(folder, body, options=Options(width=1, max_waiting=2))


def test_progress_and_reports(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        reports: list[StepReport] = []
        llm.add_listener(reports.append)
        request = await llm.start([*range(3, 63)], max_tokens=3, ignore_eos=True)
        completion = await request.result()
        assert (request.cached_tokens, request.progress) == (0, (60, 60))
        assert completion.timings == request.timings
        while len(reports) < 6:  # the last one comes after the answer
            await asyncio.sleep(0.001)
        llm.remove_listener(reports.append)
        await llm.generate([4], max_tokens=1)
        assert [(r.prefill, r.decode) for r in reports] == [(16, 0)] * 3 + [(12, 0), (0, 1), (0, 1)]
        assert [r.rows[0][1:] for r in reports] == [
            (16, 16, 60), (16, 32, 60), (16, 48, 60), (12, 60, 60), (1, 61, 60), (1, 62, 60),
        ]  # fmt: skip
        assert [r.running for r in reports] == [1] * 5 + [0]
        assert all(r.blocks_used <= r.blocks and r.seconds >= 0 for r in reports)

    trial(folder, body, options=Options(budget=16))


@pytest.mark.parametrize("drain", [None, 60.0])
def test_closing_lets_what_runs_end_or_says_so(folder: Path, drain: float | None) -> None:
    async def run() -> None:
        llm = AsyncLLM(folder)
        asked = {"max_tokens": 300, "ignore_eos": True} if drain else ENDLESS
        requests = [await llm.start(prompt, **asked) for prompt in PROMPTS]
        closing = asyncio.ensure_future(llm.close(drain))
        await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            await llm.start(PROMPTS[0])
        results = await asyncio.gather(*(request.result() for request in requests), return_exceptions=True)
        await closing
        await llm.close()
        if drain:
            assert {len(one.ids) for one in results if isinstance(one, Completion)} == {300}
            assert len(results) == len(PROMPTS)
        else:
            assert {type(one) for one in results} == {ClosedError}
        assert not any(thread.name == "inferflow-steps" for thread in threading.enumerate())

    asyncio.run(run())


def test_a_step_that_fails_ends_everything_and_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with AsyncLLM(folder) as llm:
            good = await llm.generate(PROMPTS[0], **ASKED)
            requests = [await llm.start(prompt, **ENDLESS) for prompt in PROMPTS]

            def broken(*_: object) -> None:
                raise RuntimeError("a bug")

            monkeypatch.setattr(llm.llm.engine.executor, "run", broken)
            results = await asyncio.gather(*(request.result() for request in requests), return_exceptions=True)
            assert {str(one) for one in results} == {"the engine has failed: RuntimeError: a bug (start it again)"}
            assert isinstance(llm.failure, RuntimeError)
            with pytest.raises(InferflowError, match="a bug"):
                await llm.generate(PROMPTS[0])
            assert len(good.ids) == 20

    asyncio.run(run())


def test_a_request_that_cannot_be_admitted_for_a_bug_does_not_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with AsyncLLM(folder) as llm:

            def broken(*_: object) -> None:
                raise RuntimeError("a bug")

            monkeypatch.setattr(llm.llm, "admit", broken)
            starts = [llm.start(prompt) for prompt in PROMPTS]
            results = await asyncio.wait_for(asyncio.gather(*starts, return_exceptions=True), 60)
            assert {type(one) for one in results} <= {RuntimeError, ClosedError}
            assert isinstance(llm.failure, RuntimeError)

    asyncio.run(run())
