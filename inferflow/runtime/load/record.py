"""What was seen of each request, and the figures that follow from it.

Times are seconds from one start. Latencies are named as papers name them: TTFT, from the arrival to the first token; the gaps
between tokens; end to end; and normalised, end to end over the number of new tokens (Orca, OSDI 2022; vLLM, arXiv 2309.06180).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["SLA", "Record", "moving_averages", "report"]

SPAN = 16  # tokens
QUANTILES = (50, 95, 99)


@dataclass(frozen=True)
class SLA:
    """What an interactive user is content with, as DeepSpeed-FastGen defines it (arXiv 2401.08671, and its benchmark's
    code): a prompt of p tokens is read at `prompt` tokens a second or faster,

        TTFT ≤ p / prompt,

    and the answer never comes slower than `output` tokens a second, where each gap g counts as the exponential moving average
    of span 16 up to it:

        a_n = (g_n + (1 - α) g_(n-1) + … + (1 - α)^(n-1) g_1) / (1 + (1 - α) + … + (1 - α)^(n-1)),  α = 2 / (16 + 1)
        a_n ≤ 1 / output   for every n

    The effective throughput, or goodput, is the number of requests a second for which both hold."""

    prompt: float = 512.0
    output: float = 4.0


@dataclass
class Record:
    """One request: when it arrived, the tokens of its prompt, and when each new token came. `counted`: new tokens as the server
    says, if it does, whose pieces need not be one token each. `error` says why there is no answer."""

    arrival: float
    prompt: int
    times: list[float] = field(default_factory=list)
    counted: int | None = None
    error: str | None = None

    @property
    def output(self) -> int:
        return self.counted or len(self.times)

    @property
    def ended(self) -> float:
        return self.times[-1]

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def end_to_end(self) -> float:
        return self.ended - self.arrival

    @property
    def normalised(self) -> float:
        return self.end_to_end / self.output

    def meets(self, sla: SLA) -> bool:
        if self.error is not None or self.ttft > self.prompt / sla.prompt:
            return False
        return max(moving_averages(self.gaps), default=0.0) <= 1 / sla.output


def moving_averages(values: Iterable[float], span: int = SPAN) -> list[float]:
    """The exponential moving average up to each value; weights sum to 1 from the first on (pandas' ``ewm(span)``)."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    out = []
    for value in values:
        total, weight = value + keep * total, 1 + keep * weight
        out.append(total / weight)
    return out


def report(records: Sequence[Record], sla: SLA) -> dict[str, Any]:
    """Counts, throughputs and latencies. Seconds are those from the first arrival to the last token; latencies are of what was
    answered, and None where nothing was."""
    done = [record for record in records if record.error is None and record.times]
    seconds = max((r.ended for r in done), default=0.0) - min((r.arrival for r in records), default=0.0)
    new, read = sum(r.output for r in done), sum(r.prompt for r in done)
    rates = {
        "requests_per_s": len(done),
        "effective_requests_per_s": sum(record.meets(sla) for record in done),
        "output_tokens_per_s": new,
        "tokens_per_s": new + read,
    }
    return {
        "requests": len(records),
        "failed": len(records) - len(done),
        "seconds": seconds,
        **{name: count / seconds if seconds > 0 else 0.0 for name, count in rates.items()},
        "ttft_s": summary([r.ttft for r in done]),
        "gap_s": summary([gap for r in done for gap in r.gaps]),
        "end_to_end_s": summary([r.end_to_end for r in done]),
        "normalised_s": summary([r.normalised for r in done]),
    }


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and quantiles (linear between ranks)."""
    if not values:
        return dict.fromkeys(("mean", *(f"p{q}" for q in QUANTILES)))
    quantiles = np.percentile(values, QUANTILES)
    return {
        "mean": statistics.fmean(values),
        **{f"p{q}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)},
    }
