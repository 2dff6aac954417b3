"""``inferflow generate``."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from inferflow.errors import ArgumentError

from .options import (
    dumps,
    engine_options,
    find_model,
    model_options,
    naming,
    open_llm,
    read_text,
    sampling_options,
    sampling_params,
    spec_option,
)

if TYPE_CHECKING:
    from inferflow.llm import LLM
    from inferflow.runtime.sampler import SamplingParams

__all__ = ["generate"]

MAX_PROMPT = 64 << 20  # bytes read from stdin


@dataclass
class Timer:
    """When things happened, for the figures at the end."""

    start: float = field(default_factory=time.perf_counter)
    first: float | None = None
    tokens: int = 0

    def token(self) -> None:
        self.first = self.first or time.perf_counter()
        self.tokens += 1

    def figures(self) -> dict[str, float | int | None]:
        now = time.perf_counter()
        rate = (self.tokens - 1) / (now - self.first) if self.first and self.tokens > 1 else None
        first = None if self.first is None else round(self.first - self.start, 4)
        return {
            "first_token_s": first,
            "total_s": round(now - self.start, 4),
            "decode_tokens_per_s": rate and round(rate, 2),
        }


@click.command()
@click.argument("prompt", required=False)
@model_options
@spec_option
@engine_options
@sampling_options("128, or what fits")
@click.option(
    "--chat/--raw",
    default=None,
    help="Through the model's chat template, or as it stands. Default: chat if it has one.",
)
@click.option("--system", help="A system message, with --chat.")
@click.option("--max-model-len", type=int, help="Room for prompt and answer, in tokens.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, at the end, instead of text.")
@click.option("--stats/--no-stats", default=None, help="Figures on stderr at the end. Default: on a terminal.")
def generate(prompt: str | None, **options: Any) -> None:
    """Continue PROMPT (or answer it, with a chat model), greedily unless told otherwise. Without PROMPT, or with ``-``, it is
    read from stdin; a message does not get the line end that ``echo`` adds."""
    text = read_prompt(prompt)
    params = sampling_params(options)  # refused early
    path = find_model(options["model"], options["offline"])
    room = naming(max_tokens="--max-tokens", max_model_len="--max-model-len")
    with room, open_llm(path, options, max_model_len=options["max_model_len"]) as llm:
        templated = options["chat"]
        if templated is None:
            templated = bool(llm.tokenizer and llm.tokenizer.chat_template)
        if templated and prompt in (None, "-"):
            text = text.removesuffix("\n").removesuffix("\r")
        ids = prompt_ids(llm, text, templated, options["system"])
        report = {"model": str(llm.path), "spec": llm.model.spec.name, "prompt": text, "chat": templated}
        report |= run(llm, ids, params, quiet=options["as_json"])
    if options["as_json"]:
        click.echo(dumps(report))
        return
    if not report["text"].endswith("\n"):
        click.echo()
    if sys.stderr.isatty() if options["stats"] is None else options["stats"]:
        times = report["timings"]
        speed = f", {times['decode_tokens_per_s']} tokens/s" if times["decode_tokens_per_s"] else ""
        counts = f"{report['prompt_tokens']} + {report['tokens']} tokens"
        click.echo(f"[{counts}, first after {times['first_token_s']} s{speed}]", err=True)


def prompt_ids(llm: LLM, text: str, templated: bool, system: str | None) -> list[int]:
    """The tokens of `text`, alone or as a user's message."""
    if system is not None and not templated:
        fix = "use --chat, or leave it out"
        raise ArgumentError("a system message needs a chat template", where="--system", fix=fix)
    if not templated:
        return llm.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.chat_ids([*messages, {"role": "user", "content": text}])


def run(llm: LLM, ids: list[int], params: SamplingParams, quiet: bool) -> dict[str, Any]:
    """The answer and its figures; the text is written to stdout as it comes, unless `quiet`."""
    timer = Timer()
    pieces: list[str] = []
    tokens: list[int] = []
    finish, matched = "length", None
    for chunk in llm.stream(ids, params):
        timer.token()
        tokens.append(chunk.token)
        pieces.append(chunk.text)
        finish, matched = chunk.finish or finish, chunk.stop_string
        if not quiet:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    return {
        "text": "".join(pieces), "finish": finish, "stop_string": matched, "prompt_tokens": len(ids), "tokens": len(tokens),
        "ids": tokens, "timings": timer.figures(),
    }  # fmt: skip


def read_prompt(prompt: str | None) -> str:
    """PROMPT, or all of stdin (bytes that are not UTF-8 become U+FFFD). ArgumentError where there is neither."""
    if prompt is not None and prompt != "-":
        return prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # UTF-8 whatever the locale says
    if sys.stdin is None or sys.stdin.isatty():
        raise ArgumentError("there is no prompt", where="PROMPT", fix="give one, or pipe it in")
    text = read_text(sys.stdin.buffer, "PROMPT", MAX_PROMPT)
    if not text:
        raise ArgumentError("stdin is empty", where="PROMPT", fix="give a prompt")
    return text
