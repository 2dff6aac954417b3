"""``inferflow spec``: list, show, check, new, verify."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from inferflow.errors import ArgumentError, InferflowError, one_line, system_error

from .options import dumps, find_model, model_options

__all__ = ["spec"]


@click.group()
def spec() -> None:
    """Model specs: what a model is, in one TOML file."""


@spec.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def list_command(as_json: bool) -> None:
    """The shipped specs, and which models they serve."""
    from inferflow.spec.library import families

    rows = families()
    if as_json:
        click.echo(
            json.dumps([{"spec": f.spec, "model_type": list(f.model_types), "gguf": list(f.archs)} for f in rows])
        )
        return
    width = max(len(f.spec) for f in rows)
    for f in rows:
        gguf = f"   GGUF: {', '.join(f.archs)}" if f.archs else ""
        click.echo(f"{f.spec:<{width}}  {', '.join(f.model_types)}{gguf}")


@spec.command(short_help="The graph of one layer, with all shapes.")
@click.argument("spec_name", metavar="[SPEC]", required=False)
@model_options
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="A config.json, instead of a model.")
@click.option("--layer", type=click.IntRange(min=0), default=0, show_default=True, help="Which layer.")
@click.option("--all", "all_layers", is_flag=True, help="Every layer.")
@click.option("--mermaid", "as_mermaid", is_flag=True, help="A Mermaid flowchart.")
def show(spec_name: str | None, model: str | None, offline: bool, config_file: Path | None, layer: int, all_layers: bool,
         as_mermaid: bool) -> None:  # fmt: skip
    """The graph of one layer, with the shape of every tensor: of SPEC (a name or a .toml file), or of the one that the
    model's config chooses."""
    from inferflow.graph.build import build_graph
    from inferflow.graph.dump import dump, mermaid
    from inferflow.runtime.model import choose_spec
    from inferflow.spec.library import find_spec, load_spec
    from inferflow.weights.config import read_json_object
    from inferflow.weights.open import open_source

    if config_file is not None:
        config: Mapping[str, Any] = read_json_object(config_file)
        chosen = find_spec(config) if spec_name is None else load_spec(spec_name)
        tensors: list[str] = []
    else:
        source = open_source(find_model(model, offline))
        chosen, config = choose_spec(source, spec_name, source.config)
        tensors = list(source.tensors)
    graph = build_graph(chosen, config, tensors).graph
    if layer >= graph.layers and not all_layers:
        raise ArgumentError(
            f"layer {layer} of {graph.layers}", where="--layer", fix=f"layers go from 0 to {graph.layers - 1}"
        )
    click.echo((mermaid if as_mermaid else dump)(graph, None if all_layers else layer))


@spec.command(short_help="Check a spec against a model's files.")
@click.argument("spec_file", metavar="SPEC")
@model_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def check(spec_file: str, model: str | None, offline: bool, as_json: bool) -> int:
    """Check SPEC (a .toml file, or a shipped spec's name) against a model's files: every problem, its place and its remedy."""
    from inferflow.graph.build import build_graph
    from inferflow.runtime.model import choose_spec
    from inferflow.weights.check import check_spec
    from inferflow.weights.notes import check_notes
    from inferflow.weights.open import open_source

    source = open_source(find_model(model, offline))
    try:
        chosen, config = choose_spec(source, spec_file, source.config)
        problems = check_spec(chosen, config, source)
    except InferflowError as error:
        problems = [error]
    notes = [] if problems else check_notes(chosen, config, source)
    if as_json:
        rows = [{"type": type(p).__name__, "where": p.where, "reason": p.reason, "fix": p.fix} for p in problems]
        click.echo(dumps({"ok": not problems, "problems": rows, "notes": notes}))
    elif problems:
        for problem in problems:
            click.echo(f"error: {problem}")
        click.echo(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}", err=True)
    else:
        graph = build_graph(chosen, config, source.tensors).graph
        sizes = f"{graph.layers} layers, {len(graph.weights)} weights, every tensor mapped"
        click.echo(one_line(f"{spec_file} serves {source.path}: {sizes}"))
        for note in notes:
            click.echo(f"note: {one_line(note)}")
    return 1 if problems else 0


@spec.command(short_help="Write a starting file for a new spec.")
@click.option("--like", "base", required=True, metavar="SPEC", help="The shipped spec to start from.")
@click.option("-m", "--model", metavar="MODEL", help="A model to write it for: fills in model_type.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Where to write it (default: stdout). Never overwrites."
)
def new(base: str, model: str | None, output: Path | None) -> None:
    """Write a starting file: a spec that extends SPEC, with all that it inherits as comments to change."""
    from inferflow.spec.template import starting_spec
    from inferflow.weights.open import open_source

    model_type = None
    if model is not None:
        model_type = open_source(find_model(model, False)).config.get("model_type")
    text = starting_spec(base, model_type)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ArgumentError("the file exists", where=str(output), fix="choose another name, or remove it") from None
    except OSError as error:
        raise system_error(error, str(output)) from None
    click.echo(one_line(f"wrote {output}; next: inferflow spec check {output} -m MODEL"), err=True)


@spec.command(short_help="Compare logits with transformers.")
@click.argument("spec_name", metavar="[SPEC]", required=False)
@model_options
@click.option(
    "--prompt", default="The quick brown fox jumps over the lazy dog. 0123456789", help="The text to compare on."
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=48,
    show_default=True,
    help="How many, where the model has no tokenizer: a window or chunk must be shorter to be tested.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=3e-5,
    show_default=True,
    help="The greatest difference of a logit allowed, as a share of the greatest logit (at least 1).",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def verify(spec_name: str | None, model: str | None, offline: bool, prompt: str, tokens: int, tolerance: float,
           as_json: bool) -> int:  # fmt: skip
    """Compare logits with transformers (which must be installed), both in float32, on the same weights: with SPEC (a name or
    a .toml file), or the one that the model's config chooses."""
    from .verify import compare

    report = compare(find_model(model, offline), spec_name, prompt, tokens, tolerance)
    if as_json:
        click.echo(dumps(report))
        return 0 if report["ok"] else 1
    made_up = " made-up" if report["made_up"] else ""
    click.echo(
        f"{'agree' if report['ok'] else 'DIFFER'}: greatest difference {report['max_difference']:.2e} of logits up to "
        f"{report['max_logit']:.1f} over {report['tokens']}{made_up} tokens; the likeliest token is the same at "
        f"{report['same_top']} of {report['tokens']}; token by token {'equal' if report['cached_equal'] else 'NOT equal'}"
    )
    if report["departs"]:
        click.echo(f"first departure: {report['departs']}")
    return 0 if report["ok"] else 1
