"""Figures for Prometheus, in its text format (version 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

from ..answers import Completion
from ..runtime.engine import Engine

__all__ = ["Metrics"]

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Counts of requests by route and status, of answers by how they ended, and times. Used on the event loop only."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.new_tokens = 0
        self.queued, self.first = Histogram(SECONDS), Histogram(SECONDS)
        self.whole, self.gap = Histogram(SECONDS), Histogram(GAPS)
        self.last_queued = 0.0  # seconds that the last prompt had waited

    def answered(self, completion: Completion) -> None:
        self.prompt_tokens += len(completion.prompt_ids)
        self.cached_tokens += completion.cached_tokens
        self.new_tokens += sum(len(choice.ids) for choice in completion.choices)
        self.finished.update(choice.finish for choice in completion.choices)
        times = completion.timings
        self.last_queued = times.queued
        self.queued.add(times.queued)
        self.first.add(times.queued + times.prefill)
        self.whole.add(times.queued + times.prefill + times.decode)
        longest = max(len(choice.ids) for choice in completion.choices)
        if longest > 1:
            self.gap.add(times.decode / (longest - 1))

    def text(self, engine: Engine, up: bool) -> str:
        """All of them. What the step thread counts is read as it stands."""
        scheduler, pool, totals = engine.scheduler, engine.pool, engine.scheduler.totals
        lines: list[str] = []
        gauges = {
            "up": ("1 while the engine lives", int(up)),
            "requests_running": ("sequences in the batch", len(engine.running)),
            "requests_waiting": ("sequences that wait", len(engine.waiting)),
            "tokens_waiting": ("tokens of those", scheduler.waiting_tokens),
            "kv_blocks": ("blocks of the cache", pool.blocks),
            "kv_blocks_used": ("blocks that a sequence refers to", pool.blocks - len(pool.free)),
        }
        for name, (text, value) in gauges.items():
            lines += [*_head(name, "gauge", text), f"inferflow_{name} {value}"]
        counters = {
            "steps": ("steps of the loop", totals.steps),
            "decode_tokens": ("tokens that decoding put through the model", totals.decoded),
            "prefill_tokens": ("tokens of prompts that went through the model", totals.prefilled),
            "prefix_asked_tokens": ("tokens of prompts that started", totals.asked),
            "prefix_cached_tokens": ("those of them that were in the cache", totals.cached),
            "preemptions": ("sequences that lost their place for a while", totals.preempted),
            "swaps": ("those that were written to the swap file", totals.swapped),
            "prompt_tokens": ("tokens of prompts that were answered", self.prompt_tokens),
            "generated_tokens": ("tokens of whole answers", self.new_tokens),
        }
        for name, (text, value) in counters.items():
            lines += [*_head(f"{name}_total", "counter", text), f"inferflow_{name}_total {value}"]
        by_route = {f'route="{route}",status="{status}"': count for (route, status), count in self.requests.items()}
        lines += _family("http_requests_total", "requests by route and status", by_route)
        ends = {f'finish="{finish}"': count for finish, count in self.finished.items()}
        lines += _family("answers_total", "answers by how they ended", ends)
        lines += _histogram("queue_seconds", "from arrival to the first step", self.queued)
        lines += _histogram("first_token_seconds", "from arrival to the first token", self.first)
        lines += _histogram("token_gap_seconds", "mean time between an answer's tokens", self.gap)
        lines += _histogram("answer_seconds", "from arrival to the last token", self.whole)
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP inferflow_{name} {text}", f"# TYPE inferflow_{name} {kind}"]


def _family(name: str, text: str, values: Mapping[str, int]) -> list[str]:
    return _head(name, "counter", text) + [f"inferflow_{name}{{{labels}}} {count}" for labels, count in values.items()]


def _histogram(name: str, text: str, histogram: Histogram) -> list[str]:
    def rows() -> Iterator[str]:
        below = 0
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            below += count
            yield f'inferflow_{name}_bucket{{le="{bound}"}} {below}'
        yield f"inferflow_{name}_sum {histogram.total}"
        yield f"inferflow_{name}_count {below}"

    return [*_head(name, "histogram", text), *rows()]
