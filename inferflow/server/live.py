"""What the step loop does, as it does it: reports come from the step thread, and go out as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ..async_llm import StepReport

__all__ = ["Live"]

KEPT = 4096  # reports, of which a slow reader may be behind
PAUSE = 0.05  # seconds between two events
QUIET = 10.0  # seconds without a step after which an event says so
WINDOW = 1.0  # seconds over which speed is measured


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
            recent = [report for _, report in tuple(self.reports) if report.step > last]
            if recent or not idle or now - sent > QUIET:
                last = recent[-1].step if recent else last
                idle = not recent and now - self.stepped > WINDOW
                sent = now
                event = {"steps": [_step(report) for report in recent], "tokens_per_s": self.speed(now), **state()}
                yield f"data: {json.dumps(event, allow_nan=False)}\n\n".encode()
            await asyncio.sleep(PAUSE)

    def speed(self, now: float) -> float:
        """New tokens a second, of late."""
        tokens = sum(report.decode for at, report in tuple(self.reports) if now - at <= WINDOW)
        return round(tokens / WINDOW, 1)


def _step(report: StepReport) -> dict[str, Any]:
    return {
        "step": report.step, "ms": round(1000 * report.seconds, 3), "decode": report.decode, "prefill": report.prefill,
        "cached": report.cached, "preempted": report.preempted, "rows": report.rows,
    }  # fmt: skip
