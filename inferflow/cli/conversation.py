"""A conversation: its turns, which of them still fit, and its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferflow.errors import ArgumentError, system_error

__all__ = ["Conversation", "Turn", "load", "save"]

MAX_FILE = 64 << 20  # bytes
Messages = list[dict[str, str]]


@dataclass
class Turn:
    """What the user said, and what was answered: None where nothing was, yet."""

    user: str
    answer: str | None = None


@dataclass
class Conversation:
    """`turns` from the first on, of which the model no longer sees the first `left_out`."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    left_out: int = 0

    def messages(self, left_out: int = 0) -> Messages:
        """As a chat template takes them, without the first turns."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[left_out:]:
            found.append({"role": "user", "content": turn.user})
            if turn.answer is not None:
                found.append({"role": "assistant", "content": turn.answer})
        return found

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns, self.left_out = [], 0

    def undo(self) -> None:
        """Forget the last turn."""
        self.turns.pop()
        self.left_out = min(self.left_out, max(0, len(self.turns) - 1))

    def fit(self, encode: Callable[[Messages], list[int]], length: int, answer: int) -> list[int]:
        """The prompt for the last turn, of as many turns as leave room for `answer` tokens in `length`.

        When turns must go, as many go as leave half of `length` free, so that the next turns keep the prompt's beginning, and
        with it what is cached. Raises ArgumentError where even the last turn, with the system message, does not fit."""
        ids = encode(self.messages(self.left_out))
        if len(ids) + answer <= length:
            return ids
        last = len(self.turns) - 1
        for first in range(self.left_out + 1, last + 1):
            ids = encode(self.messages(first))
            if len(ids) <= length // 2 or first == last:
                break
        if len(ids) + answer > length:
            reason = f"{len(ids)} tokens and {answer} for the answer do not fit in {length}"
            fix = "shorten it, lower --max-tokens, or raise --max-model-len"
            raise ArgumentError(reason, where="the message", fix=fix)
        self.left_out = first
        return ids


def save(conversation: Conversation, path: Path, replace: bool) -> None:
    """Write all turns to `path`, for its owner's eyes, as JSON: ``{"messages": [{"role": …, "content": …}, …]}``. Unless
    `replace`, a file that is there is an ArgumentError."""
    text = json.dumps({"messages": conversation.messages()}, ensure_ascii=False, indent=1)
    try:
        if replace:
            path.unlink(missing_ok=True)
        path.touch(0o600, exist_ok=False)
        path.write_text(f"{text}\n", encoding="utf-8")
    except FileExistsError:
        raise ArgumentError("the file exists", where=str(path), fix="choose another name, or remove it") from None
    except OSError as error:
        raise system_error(error, str(path)) from None


def load(path: Path) -> Conversation:
    """What `save` wrote, or the bare list of such messages: a system message or none, then users and assistants by turns.
    Raises ArgumentError for anything else."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        read = json.loads(data.decode("utf-8-sig")) if len(data) <= MAX_FILE else None
    except OSError as error:
        raise _wrong(path, error.strerror or type(error).__name__) from None
    except (ValueError, RecursionError):
        raise _wrong(path, "it is not JSON") from None
    messages = read.get("messages") if isinstance(read, dict) else read
    if not isinstance(messages, list):
        raise _wrong(path, "it holds no list of messages")
    return _conversation(messages, path)


def _conversation(messages: Sequence[Any], path: Path) -> Conversation:
    found = Conversation()
    for n, message in enumerate(messages):
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if not isinstance(content, str):
            raise _wrong(path, f"message {n} has no text")
        answered = not found.turns or found.turns[-1].answer is not None
        if role == "system" and n == 0:
            found.system = content
        elif role == "user" and answered:
            found.turns.append(Turn(content))
        elif role == "assistant" and not answered:
            found.turns[-1].answer = content
        else:
            raise _wrong(path, f"message {n} does not follow: system first, then user and assistant by turns")
    return found


def _wrong(path: Path, reason: str) -> ArgumentError:
    return ArgumentError(reason, where=str(path), fix="load a file that /save wrote")
