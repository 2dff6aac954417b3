"""``inferflow bench serve``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inferflow.errors import ArgumentError

from .options import dumps, engine_options, find_model, lines_for_people, model_options, naming, open_llm, spec_option
from .plot import check_plot, plot_option
from .progress import steps_line

if TYPE_CHECKING:
    from inferflow.runtime.load.compare import Driver
    from inferflow.runtime.load.record import SLA
    from inferflow.runtime.load.workload import Lengths, Workload

__all__ = ["serve"]

LENGTHS = "fixed:N, normal:MEAN:SD, uniform:LOW:HIGH or pareto:SHAPE:LOW:HIGH"
ROWS = (  # (words, path of the figure in a report, unit, its factor)
    ("requests", ("requests_per_s",), "1/s", 1),
    ("  within SLA", ("effective_requests_per_s",), "1/s", 1),
    ("new tokens", ("output_tokens_per_s",), "1/s", 1),
    ("all tokens", ("tokens_per_s",), "1/s", 1),
    *(
        (f"{words if q == 'mean' else '':<14}{q}", (name, q), "ms", 1000)
        for words, name in (
            ("first token", "ttft_s"),
            ("token gap", "gap_s"),
            ("end to end", "end_to_end_s"),
            ("  a token", "normalised_s"),
        )
        for q in ("mean", "p50", "p95", "p99")
    ),
)


def numbers(kind: type[int] | type[float], most: float) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback for ``1,2,4``: a list of such numbers above 0, sorted."""

    def parse(ctx: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
        try:
            found = None if value is None else sorted({kind(part) for part in value.split(",")})
        except ValueError:
            raise click.BadParameter(f"'{(value or '')[:80]}' is no list of numbers: write 1,2,4") from None
        if found is not None and not all(0 < number <= most for number in found):
            raise click.BadParameter(f"give numbers above 0 and up to {most:g}")
        return found

    return parse


def lengths(ctx: click.Context, parameter: click.Parameter, value: str) -> Lengths:
    from inferflow.runtime.load.workload import Lengths

    with naming(lengths=f"--{parameter.name}"):
        return Lengths.parse(value)


def policies(ctx: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    """Names, without repetition. ``prefill-first`` is an option of the loop, and here a policy like the others."""
    from inferflow.runtime.policies import POLICIES

    known = (*POLICIES, "prefill-first")
    names = list(dict.fromkeys(value.split(",")))
    for name in names:
        if name not in known:
            raise click.BadParameter(f"there is no policy '{name[:80]}': use one of {', '.join(known)}")
    return names


def agreement(ctx: click.Context, parameter: click.Parameter, value: str) -> SLA:
    from inferflow.runtime.load.record import SLA

    try:
        prompt, output = (float(part) for part in value.split(":"))
    except ValueError:
        prompt = output = 0.0
    if not (0 < prompt < 1e9 and 0 < output < 1e9):
        raise click.BadParameter(
            f"'{value[:80]}' is no SLA: write 512:4, tokens a second of the prompt and of the answer"
        )
    return SLA(prompt, output)


@click.command(short_help="Put load on a model, or on a server.")
@model_options
@spec_option
@engine_options
@click.option(
    "--url", help="Measure a server that speaks OpenAI's completions; -m is then the name it has for the model."
)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Of that server.  [env: OPENAI_API_KEY]")
@click.option("--requests", type=click.IntRange(1, 100_000), default=64, show_default=True, help="Of one run.")
@click.option("--rate", callback=numbers(float, 1e6), metavar="R[,…]",
              help="Open loop: so many arrive a second, as a Poisson process.")  # fmt: skip
@click.option("--clients", callback=numbers(int, 1024), metavar="N[,…]",
              help="Closed loop: each sends the next when it has its answer. Without either: all at once.")  # fmt: skip
@click.option("--prompt", default="fixed:256", show_default=True, callback=lengths, metavar="LENGTHS",
              help=f"Tokens of a prompt: {LENGTHS}.")  # fmt: skip
@click.option(
    "--output", default="fixed:64", show_default=True, callback=lengths, metavar="LENGTHS", help="New tokens."
)
@click.option("--policy", "names", default="fcfs", show_default=True, callback=policies, metavar="NAME[,…]",
              help="fcfs, mlfq, priority, prefill-first, sequential, static: compares them.")  # fmt: skip
@click.option("--token-budget", "budget", type=click.IntRange(1, 1 << 16), default=512, show_default=True,
              help="Tokens of a step.")  # fmt: skip
@click.option("--width", type=click.IntRange(1, 1024), help="The most sequences of a step.")
@click.option("--blocks", type=click.IntRange(1), help="Of the cache. Default: for 32 sequences, or what is free.")
@click.option("--swap", type=click.IntRange(0), default=0, help="MB of a file for sequences that make way.")
@click.option("--sla", default="512:4", show_default=True, callback=agreement, metavar="PROMPT:OUTPUT",
              help="Tokens a second at which a prompt must be read and an answer must come.")  # fmt: skip
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True, help="Requests before, not counted.")
@click.option(
    "--repeat", type=click.IntRange(1, 1000), default=3, show_default=True, help="Rounds; figures are medians."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of lengths, prompts and arrivals.")
@plot_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def serve(**options: Any) -> None:
    """Put load on MODEL, or on a server: how long requests wait for the first token and for each next one, and how many a
    second are served, also within an SLA as DeepSpeed-FastGen defines it."""
    if options["rate"] and options["clients"]:
        raise ArgumentError("requests come by --rate or from --clients", where="--rate", fix="give one of them")
    if options["plot"] is not None:
        check_plot(options["plot"])
    with drivers_of(options) as (facts, drivers, ids):
        report = measured(facts, drivers, ids, options)
    click.echo(dumps(report) if options["as_json"] else table(report))
    if options["plot"] is not None:
        plot(report, options["plot"])


@contextmanager
def drivers_of(options: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Driver], range]]:
    """What runs, as facts for the report; a driver for each policy, or for the server; and the token ids of prompts."""
    if options["url"] is not None:
        from inferflow.runtime.load.http import IDS, Server

        with naming(url="--url"):
            server = Server(options["url"], options["model"], options["api_key"]).named()
        yield {"model": server.model, "url": server.url}, {"server": server.drive}, IDS
        return
    from inferflow.runtime.load.drive import drive, engines, loop
    from inferflow.runtime.measure import engine_facts

    settings = {"budget": options["budget"], "width": options["width"], "swap_bytes": options["swap"] * 1_000_000}
    longest = options["prompt"].longest + options["output"].longest
    path = find_model(options["model"], options["offline"])
    with open_llm(path, options, max_model_len=longest, length="--prompt") as llm:
        executor = partial(llm.executor, options["threads"], options["kv"], options["isa"])
        loops = {name: loop(name, **settings) for name in options["names"]}
        made = engines(llm.model.graph, executor, loops, longest, options["blocks"])
        facts = {"model": str(llm.path), "quant": options["quant"], **engine_facts(llm.engine.executor), **settings}
        facts |= {"blocks": made[options["names"][0]].pool.blocks}
        yield facts, {name: partial(drive, engine) for name, engine in made.items()}, range(llm.model.graph.vocab)


def measured(
    facts: dict[str, Any], drivers: Mapping[str, Driver], ids: range, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The report: for each load the medians of each driver, with its rounds."""
    from inferflow.runtime.load.compare import compare, medians
    from inferflow.runtime.load.workload import workload

    drawn = partial(workload, prompt=options["prompt"], output=options["output"], ids=ids)
    seed, sla = options["seed"], options["sla"]
    points: list[dict[str, Any]] = [
        *({"rate": rate} for rate in options["rate"] or ()),
        *({"clients": clients} for clients in options["clients"] or ()),
    ] or [{}]
    if options["warmup"]:
        for driver in drivers.values():
            driver(drawn(options["warmup"], seed=[seed, options["repeat"], 0]))
    loads, done = [], 0
    total = len(points) * options["repeat"] * len(drivers)
    with steps_line(sys.stderr, "measuring") as step:
        step(0, total)
        for number, point in enumerate(points):

            def make(n: int, number: int = number, point: Mapping[str, Any] = point) -> Workload:
                # No prompt comes twice, or a cache of prefixes would know it.
                return drawn(options["requests"], seed=[seed, n, number], **point)

            def tell() -> None:
                nonlocal done
                step(done := done + 1, total)

            runs = compare(drivers, make, options["repeat"], sla, tell)
            loads.append({**point, "policies": {name: {**medians(r), "runs": r} for name, r in runs.items()}})
    lengths = {name: str(options[name]) for name in ("prompt", "output")}
    return {**facts, **lengths, "sla": {"prompt": sla.prompt, "output": sla.output}, "seed": seed, "loads": loads}


def words_of(load: Mapping[str, Any]) -> str:
    """How requests arrive."""
    if "rate" in load:
        return f"{load['rate']:g} requests a second"
    if "clients" in load:
        return f"{load['clients']} client{'s' if load['clients'] > 1 else ''}"
    return "all at once"


def table(report: Mapping[str, Any]) -> str:
    """Aligned lines for people: a column for each policy; ratios are to the first."""
    engine = report.get("url") or f"{report['engine']}, budget {report['budget']}, width {report['width'] or 'any'}"
    lines = [
        f"{report['model']}  ({engine})",
        f"prompt {report['prompt']}, output {report['output']}, medians of rounds",
    ]
    for load in report["loads"]:
        columns = load["policies"]
        failed = sum(run["failed"] for column in columns.values() for run in column["runs"])
        lines += ["", f"{words_of(load):<26}" + "".join(f"{name:>18}" for name in columns)]
        for words, path, unit, factor in ROWS:
            values = [value_at(column, path) for column in columns.values()]
            cells = "".join(f"{cell(value, values[0], factor, n):>18}" for n, value in enumerate(values))
            lines += [f"{words:<20}{unit:>6}{cells}"]
        lines += [f"failed: {failed} requests"] * bool(failed)
    return lines_for_people(lines)


def value_at(column: Any, path: Sequence[str]) -> float | None:
    for name in path:
        column = column[name]
    return column


def cell(value: float | None, first: float | None, factor: float, n: int) -> str:
    if value is None:
        return "-"
    ratio = f" ({value / first:5.2f}×)" if n and first else " " * 9
    return f"{value * factor:.4g}{ratio}"


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Over the load: requests a second, all and those within the SLA (goodput); and normalised latency, mean and P95."""
    from matplotlib.figure import Figure

    from inferflow.weights.output import writing

    loads = report["loads"]
    kind = next((kind for kind in ("rate", "clients") if kind in loads[0]), "")
    points = [load.get(kind, 0) for load in loads]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for n, name in enumerate(loads[0]["policies"]):
        columns = [load["policies"][name] for load in loads]
        good = [c["effective_requests_per_s"] for c in columns]
        left.plot(points, good, "o-", color=f"C{n}", label=f"{name}, within SLA")
        left.plot(points, [c["requests_per_s"] for c in columns], "x:", color=f"C{n}", label=f"{name}, all")
        for q, style in (("mean", "o-"), ("p95", "x:")):
            latency = [value_at(c, ("normalised_s", q)) or 0 for c in columns]
            right.plot(points, [1000 * s for s in latency], style, color=f"C{n}", label=f"{name}, {q}")
    axis = {"rate": "requests that arrive a second", "clients": "clients"}.get(kind, "")
    left.set(xlabel=axis, ylabel="requests/s served", ylim=(0, None))
    right.set(xlabel=axis, ylabel="latency, ms a token", yscale="log")
    left.legend()
    right.legend()
    sla = report["sla"]
    figure.suptitle(
        f"{Path(report['model']).name}: prompt {report['prompt']}, output {report['output']}, "
        f"SLA {sla['prompt']:g} and {sla['output']:g} tokens/s"
    )
    with writing(path):
        figure.savefig(path)
