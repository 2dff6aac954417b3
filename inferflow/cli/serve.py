"""``inferflow serve``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inferflow.errors import ArgumentError, UnsupportedError, one_line, system_error
from inferflow.runtime.policies import POLICIES
from inferflow.runtime.recommended import recommended_params

from .options import engine_options, find_model, model_options, naming, opening, read_text, spec_option, tell_doubts

if TYPE_CHECKING:
    from inferflow.async_llm import AsyncLLM
    from inferflow.server.service import Settings

__all__ = ["serve"]

COUNT = click.IntRange(min=1)
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@click.command()
@model_options
@spec_option
@engine_options
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address to listen at; 0.0.0.0 is all of them."
)
@click.option("--port", type=int, default=8000, show_default=True, help="0: any that is free.")
@click.option(
    "--api-key",
    envvar="INFERFLOW_API_KEY",
    help="What every request must bring, but for /health. Also: $INFERFLOW_API_KEY.",
)
@click.option("--api-key-file", type=click.Path(path_type=Path, dir_okay=False), help="A file that holds the key.")
@click.option("--served-model-name", "names", multiple=True, help="The name in requests; several times for several.")
@click.option("--max-model-len", type=int, help="Room for prompt and answer, in tokens.")
@click.option(
    "--slots", type=COUNT, default=8, show_default=True, help="Sequences of that length that the cache holds."
)
@click.option("--token-budget", type=COUNT, default=512, show_default=True, help="Tokens of a step.")
@click.option(
    "--policy", type=click.Choice(sorted(POLICIES)), default="fcfs", show_default=True, help="Who goes first."
)
@click.option(
    "--max-waiting", type=COUNT, default=1024, show_default=True, help="Requests that may wait; more get 429."
)
@click.option("--drain", type=click.FloatRange(0), default=30.0, show_default=True,
              help="Seconds that running requests have at the end.")  # fmt: skip
@click.option("--cors-origin", "origins", multiple=True, help="A site whose pages may ask here; * for any.")
@click.option("--allowed-host", "hosts", multiple=True, help="A name that the server may be called by; * for any.")
@click.option("--max-body", type=COUNT, default=16 << 20, show_default=True, help="Bytes of a request.")
@click.option("--quiet", is_flag=True, help="No line for each request.")
def serve(host: str, port: int, drain: float, **options: Any) -> int:
    """Serve a model over HTTP: OpenAI's completions, chats and models under /v1, /metrics, /health, /ready, and a page at /.

    SIGTERM ends it: new requests are refused, running ones may finish."""
    try:
        from inferflow.server.run import bind, is_loopback, url_of
        from inferflow.server.run import serve as serve_on
        from inferflow.server.sampling import model_defaults
    except ImportError as error:
        fix = "pip install 'inferflow[serve]'"
        raise UnsupportedError(f"{error.name} is not installed", where="serve", fix=fix) from None
    with naming(host="--host", port="--port"), bind(host, port) as bound:
        key = api_key(options)
        llm = open_server_model(options)
        names = options["names"] or (llm.llm.path.name.removesuffix(".gguf"),)
        settings = settings_of(options, names, key, host, is_loopback(bound))
        say(f"model: {names[0]} ({llm.llm.model.spec.name}, {llm.llm.engine_name} engine)")
        say(llm.llm.plan)
        say(
            f"limits: {llm.llm.max_model_len} tokens a request, {options['token_budget']} a step, "
            f"{options['max_waiting']} requests waiting, {settings.max_body} bytes a body"
        )
        for text in recommended_params(llm.llm.model.config)[1]:
            say(f"warning: {text}")
        chosen = model_defaults(llm.llm.model.config)
        say(
            f"sampling unless a request says otherwise: {', '.join(f'{name} {value}' for name, value in chosen.items())}"
        )
        if key is None and not is_loopback(bound):
            say("warning: whoever reaches this machine may use the model: set --api-key")
        bound.listen()  # from here on connections wait for the loop, which is about to begin
        say(f"listening on {url_of(bound)}{'' if key is None else ', with an API key'}")
        return serve_on(llm, settings, bound, drain)


def say(line: str) -> None:
    click.echo(one_line(line), err=True)


def api_key(options: dict[str, Any]) -> str | None:
    file = options["api_key_file"]
    if file is None:
        key = options["api_key"]
        where = "--api-key"
    else:
        key, where = key_in(file), "--api-key-file"
    if key is not None and (not key or any(c.isspace() for c in key)):
        raise ArgumentError("the key is empty, or holds a space", where=where, fix="use letters and digits")
    return key


def key_in(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return read_text(file, "--api-key-file", 1 << 16).strip()
    except OSError as error:
        said = system_error(error, str(path))
        said.fix = "--api-key-file names a file that can be read and holds the key"
        raise said from None


def open_server_model(options: dict[str, Any]) -> AsyncLLM:
    from inferflow.async_llm import AsyncLLM
    from inferflow.runtime.engine import Options

    how = Options(budget=options["token_budget"], policy=options["policy"], max_waiting=options["max_waiting"])
    path: Path = find_model(options["model"], options["offline"])
    with opening(options, max_model_len="--max-model-len", slots="--slots") as chosen:
        length = options["max_model_len"]
        llm = AsyncLLM(path, options["spec_name"], max_model_len=length, slots=options["slots"], options=how, **chosen)
    tell_doubts(llm.llm)
    return llm


def settings_of(options: dict[str, Any], names: tuple[str, ...], key: str | None, host: str, local: bool) -> Settings:
    """On a loopback address only its own names are good, lest a page whose name leads here ask as if it were ours."""
    from inferflow.server.service import Settings

    given = {name.lower() for name in options["hosts"]}
    ours = {*LOOPBACK, host.lower(), f"[{host.lower()}]"}
    hosts = None if "*" in given or not (local or given) else frozenset(ours | given)
    return Settings(names, key, options["origins"], hosts, options["max_body"], options["quiet"])
