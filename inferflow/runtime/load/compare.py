"""Several drivers against each other, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import InferflowError
from .record import SLA, Record, report
from .workload import Workload

__all__ = ["Driver", "compare", "medians"]

Driver = Callable[[Workload], list[Record]]


def compare(
    drivers: Mapping[str, Driver],
    make: Callable[[int], Workload],
    rounds: int,
    sla: SLA,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[dict[str, Any]]]:
    """Reports of each driver, round by round. In a round all of them run the same workload, ``make(round)``, one after the
    other, so that a machine which changes with time changes all of them. Raises the error of a run in which nothing was
    answered."""
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in drivers}
    for n in range(rounds):
        load = make(n)
        for name, driver in drivers.items():
            records = driver(load)
            errors = [record.error for record in records if record.error is not None]
            if len(errors) == len(records):
                raise InferflowError(f"no request was answered: {errors[0]}", where=name, fix="see what it says")
            reports[name].append(report(records, sla))
            progress()
    return reports


def medians(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figure by figure, over reports of one shape; None where a figure is missing in one of them."""
    out: dict[str, Any] = {}
    for name, first in reports[0].items():
        values = [r[name] for r in reports]
        if isinstance(first, Mapping):
            out[name] = medians(values)
        else:
            out[name] = None if None in values else statistics.median(values)
    return out
