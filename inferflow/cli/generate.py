"""``inferflow generate``."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import click

from inferflow.errors import ArgumentError

from .options import find_model, model_options, spec_option

__all__ = ["generate"]


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
        return {"first_token_s": first, "total_s": round(now - self.start, 4), "decode_tokens_per_s": rate and round(rate, 2)}


@click.command()
@click.argument("prompt", required=False)
@model_options
@spec_option
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), help="New tokens at most (default 128, or what fits).")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Keep the k likeliest tokens (0: all).")
@click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens that hold this much probability.")
@click.option("--min-p", type=float, default=0.0, help="Drop tokens below this share of the likeliest one's probability.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="End the text before this string (can be given several times).")
@click.option("--chat/--raw", default=None, help="Through the model's chat template, or as it stands. Default: chat if it has one.")
@click.option("--system", help="A system message, with --chat.")
@click.option("--ignore-eos", is_flag=True, help="Go on after end tokens.")
@click.option("--max-model-len", type=int, help="Room for prompt and answer, in tokens.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, at the end, instead of text.")
@click.option("--stats/--no-stats", default=None, help="Figures on stderr at the end. Default: on a terminal.")
def generate(prompt: str | None, model: str | None, spec_name: str | None, offline: bool, chat: bool | None,
             system: str | None, max_model_len: int | None, as_json: bool, stats: bool | None, **sampling: Any) -> None:  # fmt: skip
    """Continue PROMPT (or answer it, with a chat model), greedily unless told otherwise. Without PROMPT, or with ``-``, it is
    read from stdin."""
    from inferflow.llm import LLM
    from inferflow.runtime.sampler import SamplingParams

    text = read_prompt(prompt)
    params = SamplingParams(**sampling)  # refused before anything is loaded
    with LLM(find_model(model, offline), spec_name, max_model_len=max_model_len, offline=offline) as llm:
        templated = chat if chat is not None else bool(llm.tokenizer and llm.tokenizer.chat_template)
        if system is not None and not templated:
            raise ArgumentError("a system message needs a chat template", where="--system", fix="use --chat, or leave it out")
        messages = [{"role": "system", "content": system}] if system is not None else []
        ids: Any = llm.chat_ids([*messages, {"role": "user", "content": text}]) if templated else llm.encode(text)
        timer = Timer()
        pieces, tokens, finish, matched = [], [], "length", None
        for chunk in llm.stream(ids, params):
            if chunk.token is not None:
                timer.token()
                tokens.append(chunk.token)
            pieces.append(chunk.text)
            finish, matched = chunk.finish or finish, chunk.stop_string
            if not as_json:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        figures = timer.figures()
        if as_json:
            report = {
                "model": str(llm.path), "spec": llm.model.spec.name, "prompt": text, "chat": templated, "text": "".join(pieces),
                "finish": finish, "stop_string": matched, "prompt_tokens": len(ids), "tokens": len(tokens), "ids": tokens,
                "timings": figures,
            }  # fmt: skip
            click.echo(json.dumps(report, ensure_ascii=False))
            return
    if not "".join(pieces).endswith("\n"):
        click.echo()
    if sys.stderr.isatty() if stats is None else stats:
        rate = figures["decode_tokens_per_s"]
        speed = f", {rate} tokens/s" if rate else ""
        click.echo(f"[{len(ids)} + {len(tokens)} tokens, first after {figures['first_token_s']} s{speed}]", err=True)


def read_prompt(prompt: str | None) -> str:
    """PROMPT, or all of stdin (bytes that are not UTF-8 become U+FFFD)."""
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None or sys.stdin.isatty():
        raise ArgumentError("there is no prompt", where="PROMPT", fix="give one, or pipe it in")
    text = sys.stdin.buffer.read(1 << 26).decode("utf-8", "replace")
    if not text:
        raise ArgumentError("stdin is empty", where="PROMPT", fix="give a prompt")
    return text
