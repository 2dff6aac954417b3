"""How much of the machine others use while something is measured (Linux): a rate from a busy machine is none."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Others", "wait"]


class Others:
    """Counts from its creation on what processes other than `own` use."""

    def __init__(self, own: Iterable[int] = ()) -> None:
        self._own = (os.getpid(), *own)
        self._start = time.perf_counter()
        self._used = self._now()

    def share(self) -> float:
        """Of all cores, so far: 0.5 is one of two cores."""
        seconds = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        return max(0.0, (self._now() - self._used) / os.sysconf("SC_CLK_TCK")) / seconds

    def _now(self) -> int:
        """Clock ticks of everything but the own processes, and what other machines took from this one."""
        user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
        own = sum(sum(map(int, _fields(pid)[11:13])) for pid in self._own)
        return user + nice + system + irq + soft + steal - own


def wait(limit: float = 0.05, timeout: float = 600.0) -> bool:
    """Until others use less than `limit` of all cores for a second; False when it took too long."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        others = Others()
        time.sleep(1)
        if others.share() < limit:
            return True
    return False


def _fields(pid: int) -> list[str]:
    """Of ``/proc/PID/stat``, from the state on: the name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
