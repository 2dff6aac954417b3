"""The experiments of four papers on serving, each in one engine with its own baselines, and llama.cpp's server beside ours.

    python -m tests.bench.serving flover MODEL          32 requests that arrive after one another: makespan
    python -m tests.bench.serving fastgen MODEL         long prompts from N clients: token gaps, effective throughput
    python -m tests.bench.serving fastserve MODEL       answers of very different lengths: latency a token
    python -m tests.bench.serving servers MODEL GGUF    both servers under 16 clients

Drivers take turns in every round, with the same requests; figures are medians of rounds, and ratios are of medians, of the
first driver to the others: above 1 it is better. `--json FILE` has every run, `--plot FILE` draws.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from inferflow import LLM
from inferflow.errors import InferflowError
from inferflow.runtime.load.compare import Driver, compare, medians
from inferflow.runtime.load.drive import drive, engines, loop
from inferflow.runtime.load.http import IDS, Server
from inferflow.runtime.load.record import SLA
from inferflow.runtime.load.workload import Lengths, Workload, workload

from .peers import ROOT

# (words, path in a report, whether more is better)
MAKESPAN = ("makespan s", ("seconds",), False)
REQUESTS = ("requests/s", ("requests_per_s",), True)
GOODPUT = ("within SLA/s", ("effective_requests_per_s",), True)
TOKENS = ("new tokens/s", ("output_tokens_per_s",), True)
Figure = tuple[str, tuple[str, ...], bool]


def latency(words: str, name: str, quantile: str) -> Figure:
    return f"{words} {quantile} s", (f"{name}_s", quantile), False


@dataclass
class Experiment:
    """Runs of every driver at every point of `axis`, the load; `figures` are those to show, `drawn` those of the picture."""

    title: str
    axis: str
    figures: list[Figure]
    drawn: list[Figure]
    points: list[float] = field(default_factory=list)
    runs: list[dict[str, list[dict[str, Any]]]] = field(default_factory=list)

    def run(
        self, point: float, drivers: Mapping[str, Driver], make: Callable[[int], Workload], rounds: int, sla: SLA
    ) -> None:
        print(f"{self.axis} {point:g} …", file=sys.stderr, flush=True)
        self.points.append(point)
        self.runs.append(compare(drivers, make, rounds, sla))

    def table(self) -> str:
        heads = "".join(f"{words:>22}" for words, _, _ in self.figures)
        lines = [self.title, f"{self.axis:<12}{'':<14}{heads}"]
        for point, runs in zip(self.points, self.runs, strict=True):
            columns = {name: medians(reports) for name, reports in runs.items()}
            first = next(iter(columns.values()))
            for n, (name, report) in enumerate(columns.items()):
                cells = "".join(self.cell(report, first, figure, n) for figure in self.figures)
                lines.append(f"{'' if n else f'{point:g}':<12}{name:<14}{cells}")
        return "\n".join(lines)

    @staticmethod
    def cell(report: Any, first: Any, figure: Figure, n: int) -> str:
        _, path, more = figure
        value, best = at(report, path), at(first, path)
        if value is None or best is None:
            return f"{'-':>22}"
        over, under = (best, value) if more else (value, best)
        ratio = "" if not n else f"({over / under:.2f}×)" if under else "(∞)" if over else ""
        return f"{value:12.4g} {ratio:>9}"

    def plot(self, path: Path) -> None:
        from matplotlib.figure import Figure as Picture

        picture = Picture(figsize=(5 * len(self.drawn), 4), layout="constrained")
        for axes, (words, where, _) in zip(
            picture.subplots(1, len(self.drawn), squeeze=False)[0], self.drawn, strict=True
        ):
            for name in self.runs[0]:
                values = [at(medians(runs[name]), where) for runs in self.runs]
                axes.plot(self.points, values, "o-", label=name)
            wide = max(self.points) > 8 * min(self.points)
            axes.set(xlabel=self.axis, ylabel=words, ylim=(0, None), xscale="log" if wide else "linear")
            axes.set_xticks(self.points, [f"{point:g}" for point in self.points])
            axes.minorticks_off()
            axes.legend()
        picture.suptitle(self.title)
        picture.savefig(path)


def at(report: Any, path: Sequence[str]) -> float | None:
    for name in path:
        report = report[name]
    return report


# ---------------------------------------------------------------------- in one engine


@contextmanager
def loops(
    options: argparse.Namespace, names: Sequence[str], max_len: int, **settings: int
) -> Iterator[Mapping[str, Driver]]:
    """A driver for each policy, warmed up."""
    with LLM(options.model, max_model_len=max_len) as llm:
        made = engines(llm.model.graph, llm.executor, {name: loop(name, **settings) for name in names}, max_len)
        drivers = {name: partial(drive, engine) for name, engine in made.items()}
        options.ids = range(llm.model.graph.vocab)
        for driver in drivers.values():
            driver(workload(8, Lengths.parse("fixed:64"), Lengths.parse("fixed:16"), ids=options.ids, seed=1 << 20))
        yield drivers


def flover(options: argparse.Namespace) -> Experiment:
    """Flover (arXiv 2305.13484): 32 requests of 256 new tokens, whose gaps are exponential; their mean is a share of T1, the
    time of one request by itself. Where it is small all run together; where it is 1 there is nothing to fuse."""
    prompt, output = Lengths.parse("fixed:16"), Lengths.parse("fixed:256")
    with loops(options, ("fcfs", "sequential", "static"), 272) as drivers:
        one = partial(workload, 1, prompt, output, ids=options.ids)
        alone = statistics.median(drivers["fcfs"](one(seed=[3, n]))[0].end_to_end for n in range(3))
        title = f"Flover: 32 requests of 256 tokens, T1 = {alone:.3f} s"
        seen = Experiment(title, "gap/T1", [MAKESPAN, TOKENS], [MAKESPAN])
        for number, gap in enumerate(options.points or [0.01, 0.1, 1.0]):
            make = partial(workload, 32, prompt, output, ids=options.ids, rate=1 / (gap * alone))
            seen.run(gap, drivers, lambda n, k=number, make=make: make(seed=[n, k]), options.rounds, SLA())
    return seen


def fastgen(options: argparse.Namespace) -> Experiment:
    """DeepSpeed-FastGen (arXiv 2401.08671): clients without rest, prompts of about 1000 tokens and answers of about 50, both
    normal with a deviation of 30 %. What is compared with is its background: prompts that stop whatever decodes."""
    prompt, output = Lengths.parse(options.prompt), Lengths.parse("normal:50:15")
    title = (
        f"FastGen: prompt {prompt}, output {output}, SLA {options.sla[0]:g}:{options.sla[1]:g}, budget {options.budget}"
    )
    gap95, gap99 = (latency("gap", "gap", q) for q in ("p95", "p99"))
    seen = Experiment(
        title, "clients", [gap95, gap99, REQUESTS, GOODPUT, latency("TTFT", "ttft", "p95")], [GOODPUT, gap95]
    )
    longest = prompt.longest + output.longest
    with loops(options, ("fcfs", "prefill-first"), longest, budget=options.budget) as drivers:
        for clients in map(int, options.points or [8, 16]):
            make = partial(workload, max(16, 2 * clients), prompt, output, ids=options.ids, clients=clients)
            seen.run(
                clients, drivers, lambda n, k=clients, make=make: make(seed=[n, k]), options.rounds, SLA(*options.sla)
            )
    return seen


def fastserve(options: argparse.Namespace) -> Experiment:
    """FastServe (arXiv 2305.05920): answers with a heavy tail arrive at random, and a short one behind long ones waits, unless
    those make way. A step takes `--width` sequences, as memory does there; what pauses stays in the cache. The load is a share
    of the capacity: requests a second that are begun while all of them wait."""
    prompt, output = Lengths.parse("fixed:16"), Lengths.parse("pareto:1:4:1024")
    make = partial(workload, options.requests, prompt, output)
    with loops(options, ("mlfq", "fcfs"), 1040, width=options.width) as drivers:
        records = [drivers["fcfs"](make(ids=options.ids, seed=[4, n])) for n in range(3)]
        capacity = statistics.median(len(run) / max(record.times[0] for record in run) for run in records)
        title = f"FastServe: output {output}, width {options.width}, capacity {capacity:.1f} requests/s"
        figures = [latency("a token", "normalised", q) for q in ("mean", "p95", "p99")]
        figures += [latency("end to end", "end_to_end", q) for q in ("mean", "p99")]
        seen = Experiment(title, "load", figures, [figures[0], figures[2]])
        for number, load in enumerate(options.points or [0.7, 0.95]):
            one = partial(make, ids=options.ids, rate=load * capacity)
            seen.run(load, drivers, lambda n, k=number, one=one: one(seed=[n, k]), options.rounds, SLA())
    return seen


# ---------------------------------------------------------------------- two servers


def servers(options: argparse.Namespace) -> Experiment:
    """16 clients without rest, prompts of 256 tokens, answers of 128, over HTTP. Both servers live all the time; one that has
    nothing to do takes no processor."""
    ours = [
        sys.executable,
        "-c",
        "from inferflow.cli.main import main; main()",
        "serve",
        "--quiet",
        "-m",
        options.model,
        "--port",
    ]
    theirs = [sys.executable, "-m", "tests.bench.peer_llama_server", options.gguf]
    prompt, output = Lengths.parse("fixed:256"), Lengths.parse("fixed:128")
    figures = [TOKENS, ("all tokens/s", ("tokens_per_s",), True)]
    figures += [latency("TTFT", "ttft", q) for q in ("p50", "p95")] + [latency("gap", "gap", "p95")]
    seen = Experiment("Servers: prompts of 256, answers of 128", "clients", figures, [TOKENS, figures[3]])
    wanted = {"inferflow": ours, "llama.cpp": theirs}
    with served({name: wanted[name] for name in options.only or wanted}) as found:
        drivers = {name: server.drive for name, server in found.items()}
        for clients in map(int, options.points or [16]):
            make = partial(workload, 2 * clients, prompt, output, ids=IDS, clients=clients)
            for driver in drivers.values():
                driver(make(seed=1 << 20))
            seen.run(clients, drivers, lambda n, k=clients, make=make: make(seed=[n, k]), options.rounds, SLA())
    return seen


@contextmanager
def served(commands: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Server]]:
    """Servers, each in a process of its own on a free port, when all of them answer."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        found = {}
        for name, command in commands.items():
            port = free_port()
            process = subprocess.Popen([*command, str(port)], stdin=subprocess.PIPE, stdout=sys.stderr, cwd=ROOT)
            started.append(process)
            found[name] = answering(process, Server(f"http://127.0.0.1:{port}"))
        yield found
    finally:
        for process in started:
            process.terminate()
            process.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def answering(process: subprocess.Popen[bytes], server: Server, patience: float = 120.0) -> Server:
    """The server with its model's name, as soon as it answers."""
    until = time.monotonic() + patience
    while True:
        try:
            return server.named()
        except InferflowError:
            if process.poll() is not None or time.monotonic() > until:
                raise
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    several = lambda text: [float(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("experiment", choices=["flover", "fastgen", "fastserve", "servers"])
    parser.add_argument("model")
    parser.add_argument("gguf", nargs="?", help="of servers: the file that llama.cpp reads")
    parser.add_argument(
        "--points", type=several, metavar="X,…", help="of the load: gap/T1, clients, or share of capacity"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", default="normal:1000:300", help="of fastgen")
    parser.add_argument(
        "--sla", type=lambda text: tuple(map(float, text.split(":"))), default=(512, 4), help="of fastgen"
    )
    parser.add_argument("--budget", type=int, default=256, help="of fastgen: tokens of a step")
    parser.add_argument("--width", type=int, default=8, help="of fastserve: sequences of a step")
    parser.add_argument("--requests", type=int, default=300, help="of fastserve: those of a run")
    parser.add_argument("--only", type=lambda text: text.split(","), help="of servers: inferflow or llama.cpp")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures, run by run")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    start = time.monotonic()
    seen = globals()[options.experiment](options)
    print(seen.table())
    print(f"{options.rounds} rounds, {time.monotonic() - start:.0f} s, load average {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps(asdict(seen), indent=1))
    if options.plot:
        seen.plot(options.plot)


if __name__ == "__main__":
    main()
