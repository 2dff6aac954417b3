"""``inferflow perplexity``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from inferflow.errors import ArgumentError

from .config import model_of
from .options import (
    dumps,
    engine_options,
    find_model,
    lines_for_people,
    model_options,
    open_llm,
    read_text,
    spec_option,
)
from .progress import steps_line

if TYPE_CHECKING:
    import numpy as np

    from inferflow.llm import LLM

__all__ = ["perplexity"]

MARGIN = 64  # tokens at the end of a part, where the whole text may be cut otherwise
MAX_TEXT = 64 << 20  # bytes

_AGAINST = (
    "The base model: also give KL(base || model) and how often both find the same token likeliest. "
    "It is taken as its files have it; --spec, --kv and --quant concern MODEL alone."
)


@click.command()
@click.argument("text", metavar="FILE", type=click.File("rb"))
@model_options
@spec_option
@engine_options
@click.option("--ctx", type=click.IntRange(min=4), default=512, show_default=True, help="Tokens of a window.")
@click.option("--windows", type=click.IntRange(min=1), help="Windows at most (default: all of the text).")
@click.option("--against", metavar="MODEL", callback=model_of, help=_AGAINST)
@click.option("--against-logits", type=click.Path(path_type=Path), help="The same, from the base's saved logits.")
@click.option("--save-logits", type=click.Path(path_type=Path), help="Save this model's logits as a base for others.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def perplexity(text: BinaryIO, **options: Any) -> None:
    """Perplexity of the text in FILE (``-``: stdin), and how far MODEL is from a base model on it.

    The text's tokens are cut into windows, each beginning with BOS where the model wants it, and the second half of every
    window is scored, so that every prediction that counts has half a window before it. Logarithms are natural."""
    if options["against"] is not None and options["against_logits"] is not None:
        raise ArgumentError("the base is given twice", where="--against", fix="leave --against-logits out")
    content = read_text(text, "FILE", MAX_TEXT, plain=True)
    path = find_model(options["model"], options["offline"])
    with ExitStack() as stack:
        llm = stack.enter_context(open_llm(path, options, max_model_len=options["ctx"], length="--ctx"))
        windows = windows_of(llm, content, options["ctx"], options["windows"])
        base = base_logits(stack, llm, content, windows, options)
        report = {"model": str(llm.path), "ctx": options["ctx"], "windows": len(windows)}
        against = str(options["against_logits"] or options["against"])
        report |= evaluate(llm, windows, base, against, options["save_logits"])
    click.echo(dumps(report) if options["as_json"] else table(report))


def windows_of(llm: LLM, text: str, ctx: int, limit: int | None) -> np.ndarray:
    """The windows of `text` in the model's own tokens, int32 [windows, ctx]."""
    from inferflow.errors import TextError
    from inferflow.runtime.evaluate import cut

    if llm.tokenizer is None:
        raise TextError("the model has no tokenizer", where=str(llm.path), fix="add its tokenizer.json")
    encode = partial(llm.tokenizer.encode_spans, trusted=[], suffix=False)
    prefix, needed = encode(""), None if limit is None else limit * ctx + MARGIN
    ids = encode(text if needed is None else text[: 16 * needed])
    if needed is not None and len(ids) < needed < len(text):  # long tokens, or a short text
        ids = encode(text)
    return cut(ids, prefix, ctx, limit, text="FILE", width="--ctx")


def base_logits(
    stack: ExitStack, llm: LLM, text: str, windows: np.ndarray, options: dict[str, Any]
) -> Callable[[int], np.ndarray] | None:
    """The base's logits of the scored positions by the window's number, from a model that `stack` closes or from a file."""
    from inferflow.runtime.saved_logits import SavedLogits

    if options["against_logits"] is not None:
        saved = SavedLogits(options["against_logits"])
        saved.check(windows, llm.model.graph.vocab)
        return saved.window
    if options["against"] is None:
        return None
    path = find_model(options["against"], options["offline"])
    as_it_is = {**options, "spec_name": None, "quant": None, "kv": "auto"}
    base = stack.enter_context(open_llm(path, as_it_is, max_model_len=options["ctx"], length="--ctx"))
    vocab, theirs = llm.model.graph.vocab, base.model.graph.vocab
    same = vocab == theirs
    if same and base.tokenizer is not None:
        same = windows.tolist() == windows_of(base, text, options["ctx"], options["windows"]).tolist()
    if not same:
        reason = f"its tokens are others than the model's (vocabularies: {theirs} and {vocab})"
        raise ArgumentError(reason, where=str(base.path), fix="compare models of one tokenizer")
    return lambda n: window_logits(base, windows[n])


def window_logits(llm: LLM, window: np.ndarray) -> np.ndarray:
    """float32 [scored positions, vocab] of one window [ctx]."""
    from inferflow.runtime.evaluate import scored

    return llm.logits(window.tolist(), positions=scored(len(window)))


def evaluate(
    llm: LLM, windows: np.ndarray, base: Callable[[int], np.ndarray] | None, against: str, save: Path | None
) -> dict[str, Any]:
    """The figures of all windows, one after the other; `against` is where the base's logits come from, for errors."""
    from inferflow.runtime.evaluate import Scores
    from inferflow.runtime.saved_logits import writing_logits

    scores, start = Scores(str(llm.path), against), time.perf_counter()
    with ExitStack() as stack:
        writer = save and stack.enter_context(writing_logits(save, windows, llm.model.graph.vocab))
        for n in counted(len(windows), stack):
            logits = window_logits(llm, windows[n])
            if writer:
                writer.add(logits)
            scores.add(windows[n], logits, base and base(n))
    seconds = time.perf_counter() - start
    return {**scores.report(), "seconds": round(seconds, 3), "tokens_per_s": round(windows.size / seconds, 2)}


def counted(count: int, stack: ExitStack) -> Iterator[int]:
    """0 … count - 1, with a progress line on a terminal."""
    step = stack.enter_context(steps_line(sys.stderr, "evaluating"))
    for n in range(count):
        step(n, count)
        yield n
    step(count, count)


def table(report: dict[str, Any]) -> str:
    """Aligned lines for people."""

    def pm(name: str, scale: float = 1.0, digits: int = 4) -> str:
        error = report[f"{name}_error"]
        value = round(scale * report[name], digits) + 0.0  # a divergence may come out a little below zero: no -0.0000
        return f"{value:.{digits}f}" + ("" if error is None else f" ± {scale * error:.{digits}f}")

    size = f"{report['windows']} × {report['ctx']} tokens, {report['scored']} scored"
    lines = [f"perplexity       {pm('perplexity')}  ({size}, {report['tokens_per_s']:.0f} tokens/s)"]
    if "kld" in report:
        tail = f"99.9% below {report['kld_p99_9']:.4f}, at most {report['kld_max']:.4f}"
        lines += [
            f"base perplexity  {pm('base_perplexity')}",
            f"KL divergence    {pm('kld', digits=5)} nats, {tail}",
            f"same top token   {pm('same_top', 100, 2)} %",
        ]
    return lines_for_people(lines)
