"""``inferflow chat``."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inferflow.errors import ArgumentError, InferflowError, TextError, did_you_mean, one_line

from .conversation import Conversation, Turn, load, save
from .generate import Timer
from .lines import LeftError, Lines, message
from .options import (
    Recommended,
    engine_options,
    find_model,
    model_options,
    naming,
    open_llm,
    sampling_flags,
    sampling_options,
    sampling_params,
    spec_option,
)

if TYPE_CHECKING:
    from inferflow.llm import LLM
    from inferflow.runtime.engine import Event
    from inferflow.runtime.sampling_params import SamplingParams

__all__ = ["chat"]

ROOM = 256  # tokens that an answer of no given length must have, or a quarter of what there is
_COMMANDS_OF_A_TERMINAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HELP = '''\
/help           this
/reset          forget the conversation; the system message stays
/system TEXT    set the system message; without TEXT: have none
/retry          answer the last message again
/undo           forget the last message and its answer
/set NAME VALUE set an option such as temperature (none: as if never set);
                without VALUE: show it; without both: show all
/save FILE      write the conversation to FILE, as JSON
/load FILE      go on with one that was saved
/exit, /quit    leave (so does Ctrl-D); Ctrl-C stops an answer
A line that ends in \\ goes on; lines between """ and """ are one message.'''


@click.command()
@model_options
@spec_option
@engine_options
@sampling_options("what fits", Recommended)
@click.option("--system", help="A system message.")
@click.option("--max-model-len", type=int, help="Room for the conversation, in tokens.")
@click.option("--stats/--no-stats", default=False, help="Figures on stderr after each answer.")
def chat(**options: Any) -> None:
    """Talk with MODEL, turn by turn; /help lists what else can be typed. From a pipe, each line is a turn.

    Answers are sampled as the model's generation_config.json recommends, unless an option says otherwise."""
    from inferflow.runtime.recommended import recommended_params

    sampling_params(options)  # refused early
    path = find_model(options["model"], options["offline"])
    with open_llm(path, options, max_model_len=options["max_model_len"]) as llm:
        if llm.tokenizer is not None and llm.tokenizer.chat_template is None:
            fix = "inferflow generate --raw continues a text without one"
            raise TextError("the model has no chat template", where=str(path), fix=fix)
        recommended, warnings = recommended_params(llm.model.config)
        for text in warnings:
            click.echo(f"warning: {one_line(text)}", err=True)
        params = sampling_params(options, recommended)
        lines = Lines()
        with lines.history():
            Chat(llm, params, Conversation(options["system"]), lines, options["stats"]).run()


@dataclass
class Chat:
    """A conversation that goes on in a terminal, or through a pipe, where the first error ends it."""

    llm: LLM
    params: SamplingParams
    conversation: Conversation
    lines: Lines
    stats: bool
    file: Path | None = None  # where the conversation was saved, or loaded from

    def run(self) -> None:
        """Until the person leaves."""
        self.note(f"{self.llm.path.name}: /help says what can be typed, Ctrl-D leaves")
        with interrupts(self.llm, self.lines):
            while True:
                try:
                    self.take(message(self.lines))
                except KeyboardInterrupt:
                    if not self.lines.interactive:
                        raise
                    self.note("Ctrl-C again, or Ctrl-D, leaves")
                except LeftError:
                    return
                except InferflowError as error:
                    if not self.lines.interactive:
                        raise
                    click.echo(f"error: {error}", err=True)

    def take(self, text: str) -> None:
        """What was typed: a command or a message."""
        if not text.startswith("/"):
            if text.strip():
                self.say(text)
            return
        word, _, rest = text[1:].partition(" ")
        if word not in _COMMANDS:
            fix = did_you_mean(word, _COMMANDS) or "see /help; a message that begins so needs a blank before it"
            raise ArgumentError("there is no such command", where=f"/{word}", fix=fix)
        _COMMANDS[word](self, rest.strip())

    def say(self, text: str) -> None:
        """A message and its answer. One that was stopped before a word of it came is forgotten."""
        turns = self.conversation.turns
        if turns and turns[-1].answer is None:
            self.conversation.undo()
        turns.append(Turn(text))
        try:
            self.answer(turns[-1])
        except InferflowError:
            self.conversation.undo()
            raise

    def answer(self, turn: Turn) -> None:
        """Stream the answer to the last turn; what came before it was stopped counts."""
        conversation, length, timer = self.conversation, self.llm.max_model_len, Timer()
        before = conversation.left_out
        room = self.params.max_tokens or min(ROOM, length // 4)
        ids = conversation.fit(self.llm.chat_ids, length, room)
        if conversation.left_out > before:
            self.warn_left_out(length)
        params = replace(self.params, max_tokens=self.params.max_tokens or length - len(ids))
        finish, pieces = "stopped", list[str]()
        cached = Cached(self.llm)
        stream: Any = self.llm.stream(ids, params)
        try:
            with cached, closing(stream) as chunks:
                for chunk in chunks:
                    timer.token()
                    pieces.append(chunk.text)
                    write(chunk.text)
                    finish = chunk.finish or finish
        except KeyboardInterrupt:
            if not self.lines.interactive:
                raise
        turn.answer = "".join(pieces) or (None if finish == "stopped" else "")
        if not (turn.answer or "").endswith("\n"):
            click.echo()
        if turn.answer is None:
            self.note("stopped before a word; /retry asks again")
        elif finish == "length":
            self.note(f"cut off after {timer.tokens} tokens")
        if self.stats:
            click.echo(figures(len(ids), cached.tokens, timer), err=True)

    def warn_left_out(self, length: int) -> None:
        first = self.conversation.left_out
        what = "the first message is" if first == 1 else f"the first {first} messages are"
        click.echo(
            f"warning: the conversation no longer fits in {length} tokens: {what} left out from here on, with the answers "
            "(/reset forgets all of it, /save keeps all of it, --max-model-len makes room)",
            err=True,
        )

    def note(self, text: str) -> None:
        """For a person, and no program."""
        if self.lines.interactive:
            click.echo(f"[{one_line(text)}]", err=True)

    # ------------------------------------------------------------------ commands

    def help(self, rest: str) -> None:
        click.echo(_HELP, err=True)

    def exit(self, rest: str) -> None:
        raise LeftError

    def reset(self, rest: str) -> None:
        self.conversation.reset()
        self.note("forgotten")

    def system(self, rest: str) -> None:
        self.conversation.system = rest or None
        self.note("the system message is set" if rest else "there is no system message now")

    def undo(self, rest: str) -> None:
        if not self.conversation.turns:
            raise ArgumentError("nothing has been said", where="/undo", fix="say something")
        self.conversation.undo()
        self.note("the last message is forgotten")

    def retry(self, rest: str) -> None:
        if not self.conversation.turns:
            raise ArgumentError("nothing has been said", where="/retry", fix="say something")
        turn = self.conversation.turns[-1]
        old, turn.answer = turn.answer, None
        try:
            self.answer(turn)
        except InferflowError:
            turn.answer = old
            raise

    def save(self, rest: str) -> None:
        path = named_file("/save", rest, self.file)
        save(self.conversation, path, replace=path == self.file)
        self.file = path
        self.note(f"saved in {path}")

    def load(self, rest: str) -> None:
        path = named_file("/load", rest, self.file)
        self.conversation, self.file = load(path), path
        self.note(f"{len(self.conversation.turns)} messages and their answers")

    def set(self, rest: str) -> None:
        flags = sampling_flags(click.get_current_context().command)
        name, _, text = rest.partition(" ")
        key = name.replace("_", "-")
        if name and key not in flags:
            fix = did_you_mean(key, flags) or f"there are {', '.join(flags)}"
            raise ArgumentError(f"there is no option '{name}'", where="/set", fix=fix)
        if text.strip():
            self.params = replaced(self.params, flags[key], text.strip())
            return
        for shown in [key] if name else flags:
            click.echo(f"{shown} {getattr(self.params, str(flags[shown].name))}", err=True)


_COMMANDS: Mapping[str, Callable[[Chat, str], None]] = {
    "help": Chat.help, "reset": Chat.reset, "system": Chat.system, "retry": Chat.retry, "undo": Chat.undo, "set": Chat.set,
    "save": Chat.save, "load": Chat.load, "exit": Chat.exit, "quit": Chat.exit,
}  # fmt: skip


class Cached:
    """Inside, `tokens` becomes how many of the prompt's tokens were there already, from turns before."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokens = llm, 0

    def __enter__(self) -> None:
        self.llm.listeners.append(self._look)

    def __exit__(self, *error: object) -> None:
        self.llm.listeners.remove(self._look)

    def _look(self, events: list[Event]) -> None:
        for event in events:
            self.tokens = event.sequence.cached or 0


@contextmanager
def interrupts(llm: LLM, lines: Lines) -> Iterator[None]:
    """Inside, where a person types, a Ctrl-C at the prompt is a KeyboardInterrupt there; during an answer it is one at the end
    of the step that runs, so that nothing is half done in the engine; at any other time it is nothing."""
    if not lines.interactive:
        yield
        return

    def ask(number: int, frame: object) -> None:
        lines.asked = True
        if lines.reading:
            raise KeyboardInterrupt

    def look(events: list[Event]) -> None:
        if lines.asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, ask)
    llm.listeners.append(look)
    try:
        yield
    finally:
        llm.listeners.remove(look)
        signal.signal(signal.SIGINT, before)


def replaced(params: SamplingParams, option: click.Option, text: str) -> SamplingParams:
    """`params` with the value of `option` that `text` says; ``none`` is what it is where nobody says anything."""
    name = str(option.name)
    value: Any = type(params).__dataclass_fields__[name].default
    try:
        if text != "none":
            value = option.type.convert(text, option, None)
    except click.BadParameter as error:
        raise ArgumentError(error.message.rstrip("."), where=f"/set {name}", fix="see inferflow chat --help") from None
    values: dict[str, Any] = {name: (value,) if option.multiple and text != "none" else value}
    with naming(**{name: f"/set {name}"}):
        return replace(params, **values)


def named_file(command: str, text: str, known: Path | None) -> Path:
    """The file that was typed, or else the one that is known already."""
    if not text and known is None:
        raise ArgumentError("no file is named", where=command, fix=f"write {command} FILE")
    return Path(text).expanduser() if text else Path(str(known))


def write(text: str) -> None:
    """To stdout, at once. What a model says is no command to a terminal."""
    if sys.stdout.isatty():
        text = _COMMANDS_OF_A_TERMINAL.sub(lambda found: ascii(found[0])[1:-1], text)
    sys.stdout.write(text)
    sys.stdout.flush()


def figures(prompt: int, cached: int, timer: Timer) -> str:
    times = timer.figures()
    speed = f", {times['decode_tokens_per_s']} tokens/s" if times["decode_tokens_per_s"] else ""
    first = "" if times["first_token_s"] is None else f", first after {times['first_token_s']} s"
    return f"[{prompt} + {timer.tokens} tokens, {cached} cached{first}{speed}]"
