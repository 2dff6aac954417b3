"""What the step loop does, as it does it: reports come from the step thread, and go out as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import takewhile
from typing import Any

from ..async_llm import StepReport

__all__ = ["Live"]

KEPT = 4096  # reports, of which a slow reader may be behind
PAUSE = 0.05  # seconds between two events
CALM = 0.25  # between two without steps, while the speed falls
QUIET = 10.0  # between two after that
WINDOW = 3.0  # seconds over which speed is measured: a long step is no standstill


class Live:
    """The last reports. `stepped` is when a step ended, of time.monotonic; `slowest` the longest so far, in seconds."""

    def __init__(self) -> None:
        self.reports: deque[tuple[float, StepReport]] = deque(maxlen=KEPT)
        self.stepped = time.monotonic()
        self.slowest = 0.0

    def push(self, report: StepReport) -> None:
        """On the step thread."""
        self.stepped = time.monotonic()
        self.slowest = max(self.slowest, report.seconds)
        self.reports.append((self.stepped, report))

    async def events(
        self, state: Callable[[], dict[str, Any]], ended: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        """About twenty times a second, the steps since the last event and `state` of the loop; when nothing happens only now
        and then. The first one comes at once."""
        last = self.reports[-1][1].step if self.reports else 0
        sent, idle = float("-inf"), False
        while not ended():
            now = time.monotonic()
            recent = self.since(step=last)
            if recent or now - sent > (QUIET if idle else CALM):
                last = recent[-1].step if recent else last
                idle = not recent and now - self.stepped > WINDOW  # the speed is 0 by then
                sent = now
                event = {"steps": [_step(report) for report in recent], "tokens_per_s": self.speed(now), **state()}
                yield f"data: {json.dumps(event, allow_nan=False)}\n\n".encode()
            await asyncio.sleep(PAUSE)

    def since(self, step: int = 0, at: float = 0.0) -> list[StepReport]:
        """The reports after that step and that time. Older ones, of which there are thousands, are not looked at."""
        kept = reversed(tuple(self.reports))  # a copy: the step thread goes on
        return [report for _, report in takewhile(lambda one: one[1].step > step and one[0] >= at, kept)][::-1]

    def speed(self, now: float) -> float:
        """New tokens a second, of late."""
        tokens = sum(report.decode for report in self.since(at=now - WINDOW))
        return round(tokens / WINDOW, 1)


def _step(report: StepReport) -> dict[str, Any]:
    return {
        "step": report.step, "ms": round(1000 * report.seconds, 3), "decode": report.decode, "prefill": report.prefill,
        "cached": report.cached, "preempted": report.preempted, "rows": report.rows,
    }  # fmt: skip
