"""``inferflow quantize``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from inferflow.errors import ArgumentError, TextError

from .config import named_model
from .options import dumps, find_model, formats_given, lines_for_people, naming, read_text, spec_option
from .progress import steps_line

if TYPE_CHECKING:
    import numpy as np

    from inferflow.runtime.model import Model
    from inferflow.runtime.quantise import Report
    from inferflow.weights.stored import Stored

__all__ = ["quantize"]

WINDOW = 512  # tokens that calibration sees together
MAX_TEXT = 256 << 20  # bytes
PARTS = 64  # of a long text
SHOWN = 10  # fallbacks of the table


@click.command()
@click.argument("model", metavar="MODEL", callback=named_model, is_eager=True)
@click.option(
    "--to",
    "formats",
    required=True,
    metavar="FORMATS",
    callback=formats_given,
    help="q3, q3.5, q4, q8, f16, bf16, f32 or keep, then exceptions: q3.5,output=q4,layers.0.*=q8. Or a .toml file.",
)
@click.option("-o", "--output", "out", required=True, type=click.Path(path_type=Path), help="The directory to make.")
@click.option(
    "--calibrate",
    "text",
    type=click.File("rb"),
    metavar="FILE",
    help="A text (-: stdin) that the model is run on, so that the errors fall where they harm least.",
)
@click.option(
    "--calibrate-tokens",
    type=click.IntRange(min=16),
    default=16384,
    show_default=True,
    help="Tokens of it that are used, spread over all of it.",
)
@click.option("--rotation", type=int, default=None, help="Width of the Hadamard blocks: a power of two, or 0 for none.")
@click.option("--threads", type=click.IntRange(min=1), help="Processors to use (default: all).")
@click.option("--force", is_flag=True, help="Replace a quantised directory that is there.")
@click.option("--offline", is_flag=True, help="Download nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@spec_option
def quantize(model: str, formats: str, out: Path, text: BinaryIO | None, **options: Any) -> None:
    """Make a smaller model of MODEL: a directory that loads by mapping it, with nothing unpacked.

    Without --calibrate a matrix is quantised by its weights alone."""
    limit_threads(options["threads"])
    from inferflow.runtime.model import load_model
    from inferflow.runtime.quantise import quantise_model, uncalibrated
    from inferflow.weights.choice import parse_choice
    from inferflow.weights.directory import check_output
    from inferflow.weights.stored import ROTATION

    with naming(quant="--to"):
        choice = parse_choice(formats)
    rotation = ROTATION if options["rotation"] is None else check_rotation(options["rotation"])
    check_output(out, options["force"])
    content = None if text is None else read_text(text, "--calibrate", MAX_TEXT, plain=True)
    path = find_model(model, options["offline"])
    with naming(quant="--to"):
        loaded = load_model(path, options["spec_name"], quant=choice)
    original = sum(tensor.nbytes for tensor in loaded.source.tensors.values())
    facts: dict[str, Any] = {"to": str(choice)}
    matrices: Callable[[list[str]], Iterable[tuple[str, Stored]]]
    if content is None:
        matrices = lambda keys: uncalibrated(loaded, keys, rotation)  # noqa: E731
    else:
        from inferflow.runtime.calibrate import Calibrator

        windows = windows_of(loaded, path, content, options["calibrate_tokens"])
        facts["calibrated_on"] = {"text": Path(str(getattr(text, "name", "-"))).name, "tokens": int(windows.size)}
        matrices = Calibrator(loaded, windows, rotation).matrices
    with steps_line(sys.stderr, "quantising") as step:
        report = quantise_model(
            loaded,
            out,
            matrices,
            force=options["force"],
            facts=facts,
            progress=lambda _, done, total: step(done, total),
        )
    told = summary(report, {"original_bytes": original, **facts})
    click.echo(dumps(told) if options["as_json"] else table(report, original))


def limit_threads(threads: int | None) -> None:
    """Keep this process to so many processors, before libraries count them. ArgumentError where the system has no way to."""
    if threads is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ArgumentError("this system cannot limit them", where="--threads", fix="leave it out")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def check_rotation(width: int) -> int:
    """`width`, if blocks can be so wide."""
    if width and (not 2 <= width <= 1 << 16 or width & (width - 1)):
        raise ArgumentError(f"it is {width}", where="--rotation", fix="give a power of two up to 65536, or 0 for none")
    return width


def windows_of(model: Model, path: Path, text: str, tokens: int) -> np.ndarray:
    """Windows of `text` in the model's own tokens, of some `tokens` in all, spread evenly: int32 [windows, length]."""
    import numpy as np

    from inferflow.runtime.evaluate import cut
    from inferflow.runtime.model import context_length
    from inferflow.text import load_tokenizer

    tokenizer = load_tokenizer(model.source, path)
    if tokenizer is None:
        raise TextError("the model has no tokenizer", where=str(path), fix="add its tokenizer.json")
    text = thinned(text, max(PARTS * 16384, 16 * tokens))
    ids, prefix = (tokenizer.encode_spans(part, [], suffix=False) for part in (text, ""))
    length = min(n for n in (WINDOW, tokens, *context_length(model)) if n is not None)
    windows = cut(ids, prefix, length, text="--calibrate", width="")
    return windows[np.linspace(0, len(windows) - 1, max(1, min(len(windows), tokens // length))).astype(int)]


def thinned(text: str, most: int) -> str:
    """`text`, or evenly spread parts of one that is longer than `most` characters: more than is used takes memory and time."""
    if len(text) <= most:
        return text
    length = most // PARTS
    return "\n".join(text[(len(text) - length) * n // (PARTS - 1) :][:length] for n in range(PARTS))


def summary(report: Report, facts: dict[str, Any]) -> dict[str, Any]:
    """The figures for programs."""
    return {
        "path": str(report.path), "bytes": report.bytes, "weights": report.weights,
        "bits_per_weight": round(report.bits_per_weight, 3), "seconds": round(report.seconds, 1), **facts,
        "formats": {name: {"tensors": count, "bytes": size} for name, (count, size) in report.formats.items()},
        "fallbacks": [{"key": f.key, "wanted": f.wanted, "got": f.got, "why": f.why} for f in report.fallbacks],
    }  # fmt: skip


def table(report: Report, original: int) -> str:
    """The figures for people; `original` is how many bytes the tensors had."""
    lines = [
        f"{report.path}: {report.bytes / 1e6:.1f} MB, {report.bits_per_weight:.2f} bits per weight, "
        f"in {report.seconds:.0f} s (the original has {original / 1e6:.1f} MB)"
    ]
    for name, (count, size) in sorted(report.formats.items(), key=lambda item: -item[1][1]):
        lines.append(f"  {name:<6} {count:>5} tensors {size / 1e6:>9.1f} MB")
    lines += [f"  {fallback}" for fallback in report.fallbacks[:SHOWN]]
    if len(report.fallbacks) > SHOWN:
        lines.append(f"  and {len(report.fallbacks) - SHOWN} more that keep the file's format")
    return lines_for_people(lines)
