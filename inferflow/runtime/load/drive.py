"""Running a workload on an engine, in this thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from ...errors import InferflowError
from ...graph.graph import Graph
from ..engine import Engine, Event, Options, Sequence
from ..executor import Executor
from ..memory import free_memory, plan_memory
from ..policies import Policy
from ..sampler import SamplingParams
from .record import Record
from .workload import Request, Workload

__all__ = ["drive", "engines", "loop"]

SLOTS = 32  # sequences of the greatest length that a cache has room for


def drive(
    engine: Engine,
    load: Workload,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Record]:
    """The records of a workload's requests, in order. Whatever has arrived is added before a step; tokens of a step come when
    it ends. Requests of an open loop arrive when they say, even if a step is on its way. Those that the engine refuses, or
    that fail, have an error."""
    queue = deque(load.requests)
    records: list[Record] = []
    live: dict[int, tuple[Sequence, Record]] = {}
    start = clock()
    try:
        while queue or live:
            now = clock() - start
            while queue and queue[0].at <= now and (load.clients is None or len(live) < load.clients):
                request = queue.popleft()
                records.append(Record(request.at if load.clients is None else now, len(request.prompt)))
                _begin(engine, request, records[-1], live)
            if not live:
                if queue and queue[0].at > now:
                    sleep(queue[0].at - now)
                continue
            events = engine.step()
            now = clock() - start
            for event in events:
                _note(event, now, live)
    finally:
        for sequence, _ in live.values():
            engine.abort(sequence)
    return records


def _begin(engine: Engine, request: Request, record: Record, live: dict[int, tuple[Sequence, Record]]) -> None:
    try:
        params = SamplingParams(max_tokens=request.output, ignore_eos=True)
        sequence = engine.add(list(request.prompt), params)
    except InferflowError as error:
        record.error = str(error)
    else:
        live[sequence.arrival] = sequence, record


def _note(event: Event, now: float, live: dict[int, tuple[Sequence, Record]]) -> None:
    record = live[event.sequence.arrival][1]
    if event.token is not None:
        record.times.append(now)
    if event.error is not None:
        record.error = str(event.error)
    if event.finish is not None:
        del live[event.sequence.arrival]


def loop(policy: str | Policy, **options: int | None) -> Options:
    """The loop's options under a policy; ``prefill-first`` is one of them, and here a policy like the others."""
    if policy == "prefill-first":
        return Options(prefill_first=True, **options)  # type: ignore[arg-type]
    return Options(policy=policy, **options)  # type: ignore[arg-type]


def engines(
    graph: Graph,
    executor: Callable[[], Executor],
    loops: Mapping[str, Options],
    max_len: int,
    blocks: int | None = None,
) -> dict[str, Engine]:
    """An engine for each loop, with caches of one size: `blocks`, or for 32 sequences of `max_len` tokens, as far as there is
    memory for all the engines. Each has an executor, and so a cache, of its own."""
    executors = {name: executor() for name in loops}
    one = next(iter(executors.values()))
    free = free_memory()
    share = None if free is None else free // len(loops)
    blocks = plan_memory(one.block_bytes, one.block_size, max_len, SLOTS, blocks, share).blocks
    return {
        name: Engine(graph, executors[name], max_len=max_len, blocks=blocks, options=options)
        for name, options in loops.items()
    }
