"""``inferflow bench``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .bench_serve import serve
from .options import dumps, engine_options, find_model, lines_for_people, model_options, open_llm, spec_option
from .plot import check_plot, plot_option
from .progress import steps_line

if TYPE_CHECKING:
    from inferflow.llm import LLM

__all__ = ["bench"]

FIRST_PROMPT = 16  # tokens
COMMANDLINE = click.core.ParameterSource.COMMANDLINE


def batch_sizes(ctx: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    """``1,2,4`` as sorted numbers; 1 is always among them."""
    try:
        sizes = {int(part) for part in value.split(",")}
    except ValueError:
        raise click.BadParameter(f"'{value[:80]}' is no list of numbers: write 1,4,16") from None
    if not all(1 <= size <= 1024 for size in sizes):
        raise click.BadParameter("give numbers from 1 to 1024")
    return sorted(sizes | {1})


@click.group(invoke_without_command=True)
@model_options
@spec_option
@engine_options
@click.option(
    "--prefill", type=click.IntRange(1, 1 << 20), default=512, show_default=True, help="Tokens of the prompt."
)
@click.option(
    "--decode",
    type=click.IntRange(1, 1 << 20),
    default=128,
    show_default=True,
    help="New tokens, after a prompt as long.",
)
@click.option("--batch", "batches", default="1,2,4,8,16,32", show_default=True, callback=batch_sizes,
              help="How many sequences to decode together.")  # fmt: skip
@click.option(
    "--repeat", type=click.IntRange(1, 1000), default=5, show_default=True, help="Rounds; figures are medians."
)
@plot_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> None:
    """Measure MODEL here: prefill, decode of 1 to 32 sequences, time to the first token, memory; and how much of the memory's
    own read bandwidth, probed before and after each round, decoding reaches."""
    if ctx.invoked_subcommand is not None:
        given = (p.opts[-1] for p in ctx.command.params if ctx.get_parameter_source(p.name or "") is COMMANDLINE)
        if option := next(given, None):
            raise click.UsageError(f"{option} is of bench alone: give serve its options after its name")
        return
    start = time.perf_counter()
    if options["plot"] is not None:
        check_plot(options["plot"])
    path = find_model(options["model"], options["offline"])
    report = measured(path, start, options)
    click.echo(dumps(report) if options["as_json"] else table(report))
    if options["plot"] is not None:
        plot(report, options["plot"])


bench.add_command(serve)


def measured(path: Path, start: float, options: dict[str, Any]) -> dict[str, Any]:
    """The figures of the model at `path`; `start` is when the command began, where the system cannot say when the process
    did."""
    from inferflow.runtime.measure import Sizes, engine_facts, measure, process_age, weight_bytes

    sizes = Sizes(options["prefill"], options["decode"], options["batches"])
    length = "--prefill" if sizes.longest == sizes.prefill + 1 else "--decode"
    with open_llm(path, options, max_model_len=sizes.longest, length=length) as llm:
        executor = llm.engine.executor
        loaded = process_age() or time.perf_counter() - start
        first_token(llm)
        first = process_age() or time.perf_counter() - start
        report = {"model": str(llm.path), "spec": llm.model.spec.name, "quant": options["quant"]}
        report |= engine_facts(executor)
        report |= {"load_s": round(loaded, 3), "first_token_s": round(first, 3)}
        with steps_line(sys.stderr, "measuring") as step:
            report |= measure(llm.model.graph, executor, sizes, options["repeat"], step)
        size = weight_bytes(llm.model.graph, llm.model.weights, executor)
    speed = size * report["decode"][0]["tokens_per_s"] / 1e9
    report |= {"weight_bytes_per_token": size, "decode_gb_per_s": round(speed, 3)}
    return report | {"share_of_read": round(speed / report["read_gb_per_s"], 4)}


def first_token(llm: LLM) -> None:
    """One new token after a short prompt."""
    vocab, count = llm.model.graph.vocab, min(FIRST_PROMPT, llm.max_model_len - 1)
    llm.generate([[n % vocab for n in range(count)]], max_tokens=1)


def table(report: dict[str, Any]) -> str:
    """Aligned lines for people."""
    engine = report["engine"]
    if report["isa"] is not None:
        engine += f", {report['isa']}, {report['threads']} thread{'s' if report['threads'] > 1 else ''}"
    lines = [f"{report['model']}  ({engine})", ""]
    lines += [f"first token     {report['first_token_s']:10.2f} s  after the start ({report['load_s']:.2f} s to load)"]
    if report["peak_bytes"] is not None:
        lines += [f"peak memory     {report['peak_bytes'] / 1e6:10.0f} MB"]
    lines += [f"prefill {report['prefill']['tokens']:<7} {report['prefill']['tokens_per_s']:10.1f} tokens/s"]
    for row in report["decode"]:
        scale = row["tokens_per_s"] / report["decode"][0]["tokens_per_s"]
        lines += [f"decode × {row['sequences']:<6} {row['tokens_per_s']:10.1f} tokens/s  ({scale:.2f} times one)"]
    lines += [
        f"weights         {report['weight_bytes_per_token'] / 1e6:10.1f} MB read by a token",
        f"decode reads    {report['decode_gb_per_s']:10.2f} GB/s",
        f"memory reads    {report['read_gb_per_s']:10.2f} GB/s  (of which decoding reaches {report['share_of_read']:.0%})",
    ]
    return lines_for_people(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Decode by number of sequences, beside what one sequence would give times their number; and the bandwidths."""
    from matplotlib.figure import Figure

    from inferflow.weights.output import writing

    counts = [row["sequences"] for row in report["decode"]]
    rates = [row["tokens_per_s"] for row in report["decode"]]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    left.plot(counts, [rates[0] * n for n in counts], ":", color="grey", label="one sequence's speed × their number")
    left.plot(counts, rates, "o-", label="decode")
    left.axhline(
        report["prefill"]["tokens_per_s"], ls="--", color="C1", label=f"prefill of {report['prefill']['tokens']}"
    )
    left.set(xscale="log", yscale="log", xlabel="sequences", ylabel="tokens/s of all together")
    left.set_xticks(counts, [str(n) for n in counts], minor=False)
    left.minorticks_off()
    left.legend()
    bars = right.bar(["decode", "memory"], [report["decode_gb_per_s"], report["read_gb_per_s"]], color=["C0", "grey"])
    right.bar_label(bars, fmt="%.1f")
    right.set(ylabel="GB/s read")
    figure.suptitle(f"{Path(report['model']).name} ({report['engine']})")
    with writing(path):
        figure.savefig(path)
