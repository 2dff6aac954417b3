"""Engines side by side, interleaved: in each round every engine in turn does each measurement, and the bandwidth of the
memory is probed. The figures are medians of the rounds after the first, in which memory is touched for the first time.

    python -m tests.bench.compare 0.5B inferflow=DIR llama.cpp=q4_0.gguf openvino=q4_0.gguf [1.5B inferflow=…] --json out.json

A word begins a model, ENGINE=PATH adds an entry to it; ratios are of a model's first entry to each of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inferflow.kernels import native

from .peers import ENGINES, Peer

__all__ = ["Entry", "Model", "compare", "parse"]


@dataclass
class Entry:
    """One engine with one file. `runs` has the rates of each round by measurement, in tokens a second; `peak_bytes` is the most
    memory that its process had."""

    engine: str
    path: str
    bytes: int
    runs: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int | None = None

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(rates) for name, rates in self.runs.items()}


@dataclass
class Model:
    """Entries that are compared; `read_gb_per_s` and `load` are the memory's bandwidth and the load average, round by round."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    read_gb_per_s: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """All of it, with medians, and the ratios of the first entry's medians to the others'."""
        entries = [{**asdict(entry), "medians": entry.medians} for entry in self.entries]
        mine = self.entries[0].medians
        ratios = [
            {"to": f"{other.engine}={other.path}", **{name: mine[name] / rate for name, rate in other.medians.items()}}
            for other in self.entries[1:]
        ]
        return {**asdict(self), "entries": entries, "ratios": ratios}


def parse(words: Sequence[str]) -> list[Model]:
    """Models from the command line; ValueError for words that make none."""
    models: list[Model] = []
    for word in words:
        engine, equals, path = word.partition("=")
        if not equals:
            models.append(Model(word))
            continue
        if engine not in ENGINES:
            raise ValueError(f"there is no engine '{engine}'; there are {', '.join(ENGINES)}")
        if not models:
            raise ValueError(f"'{word}' comes before the name of its model")
        models[-1].entries.append(Entry(engine, path, size_of(Path(path))))
    if not models or not all(model.entries for model in models):
        raise ValueError("every model needs an entry: NAME ENGINE=PATH …")
    return models


def size_of(path: Path) -> int:
    """Bytes of a file, or of a directory's files; ValueError where there is nothing."""
    if not path.exists():
        raise ValueError(f"there is no '{path}'")
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def compare(model: Model, options: argparse.Namespace, tell: Callable[[str], None]) -> None:
    """Fills `model` with the figures of `options.rounds` rounds."""
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(e.engine, e.path, options.threads)) for e in model.entries]
        for n in range(options.rounds + 1):
            tell(f"{model.name}: round {n} of {options.rounds}")
            rates = one_round(peers, options)
            if n:
                model.read_gb_per_s.append(native.read_bandwidth(options.threads))
                model.load.append(os.getloadavg()[0])
                for entry, row in zip(model.entries, rates, strict=True):
                    for name, rate in row.items():
                        entry.runs.setdefault(name, []).append(rate)
        for entry, peer in zip(model.entries, peers, strict=True):
            entry.peak_bytes = peak_of(peer.pid)


def one_round(peers: Sequence[Peer], options: argparse.Namespace) -> list[dict[str, float]]:
    """The rates of each peer, by measurement. Peers take turns within every measurement."""
    out: list[dict[str, float]] = [{} for _ in peers]
    n = options.decode
    for peer, row in zip(peers, out, strict=True):
        row["prefill"] = peer.prefill(options.prefill)
    for peer, row in zip(peers, out, strict=True):
        row["decode"] = peer.decode(n, context=n)
    for peer, row in zip(peers, out, strict=True):
        batched = peer.batched(options.sequences, n, n)
        row["batched"], row["batched_total"] = batched.decode, batched.total
    return out


def peak_of(pid: int) -> int | None:
    """The most memory, in bytes, that a running process had resident; None where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def table(model: Model, options: argparse.Namespace) -> str:
    """One line an entry: medians, and in brackets how many times as fast the first entry is."""
    n = options.decode
    heads = (f"prefill {options.prefill}", f"decode {n}", f"{options.sequences} × {n}", "with prompts")
    bandwidth = statistics.median(model.read_gb_per_s)
    labels = [f"{entry.engine} {Path(entry.path).name}" for entry in model.entries]
    width = max(map(len, labels))
    lines = [
        f"{model.name}: {options.rounds} rounds, {options.threads} threads, memory {bandwidth:.1f} GB/s, "
        f"load {max(model.load):.1f} at most; tokens/s",
        f"{'':<{width}} {'MB':>6} {'peak MB':>8} " + " ".join(f"{head:>17}" for head in heads),
    ]
    first = model.entries[0].medians
    for label, entry in zip(labels, model.entries, strict=True):
        cells = [f"{rate:9.1f} ({first[name] / rate:4.2f}×)" for name, rate in entry.medians.items()]
        peak = f"{(entry.peak_bytes or 0) / 1e6:8.0f}"
        lines.append(f"{label:<{width}} {entry.bytes / 1e6:6.0f} {peak} " + " ".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("words", nargs="+", metavar="NAME ENGINE=PATH …")
    for name, default in (("rounds", 5), ("threads", 2), ("prefill", 512), ("decode", 128), ("sequences", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures, run by run")
    options = parser.parse_args(argv)
    try:
        models = parse(options.words)
    except ValueError as error:
        parser.error(str(error))
    reports = []
    for model in models:
        compare(model, options, lambda text: print(text, file=sys.stderr, flush=True))
        print(table(model, options), end="\n\n", flush=True)
        reports.append(model.report())
        if options.json:  # after each model: a long run that is cut short leaves what it had
            facts = {"machine": platform.processor() or platform.machine(), "isa": native.isa_name(), **vars(options)}
            options.json.write_text(json.dumps({**facts, "json": str(options.json), "models": reports}, indent=1))


if __name__ == "__main__":
    main()
