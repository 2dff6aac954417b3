"""The exception tree: every refusal a user can meet, as one sentence that names the input, the reason and the fix.

An `InferflowError` is the user's problem (a bad file, a bad argument) and is printed without a traceback; anything else
that escapes is a bug of ours. `where` is the place in words (``file.toml:12:7``, ``model.gguf``, a tensor's name), `fix` is
what to do about it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "ClosedError",
    "DeadlineError",
    "FetchError",
    "GraphError",
    "InferflowError",
    "QueueFullError",
    "SpecError",
    "TextError",
    "UnsupportedError",
    "did_you_mean",
    "one_line",
    "system_error",
]


class InferflowError(Exception):
    """Base of all refusals. ``str(error)`` is ``where: reason (fix)``, on one line."""

    def __init__(self, reason: str, *, where: str = "", fix: str = "") -> None:
        self.reason = reason
        self.where = where
        self.fix = fix
        super().__init__(reason)

    def __str__(self) -> str:
        head = f"{one_line(self.where, 500)}: " if self.where else ""
        tail = f" ({one_line(self.fix, 1000)})" if self.fix else ""
        return f"{head}{one_line(self.reason)}{tail}"


def one_line(text: str, limit: int = 2500) -> str:
    """`text` as it can be printed: control characters, which a file's names may hold, are escaped; what is longer than
    `limit` loses its middle."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} … {text[-limit // 2 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_REMEDIES = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space, or write to another disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or write to another disk",
    errno.EROFS: "write to another place",
    errno.EACCES: "check the permissions, or choose another place",
    errno.EPERM: "check the permissions, or choose another place",
    errno.ENOENT: "make its folder first, or choose another place",
    errno.ENOTDIR: "choose a place in a folder",
    errno.EISDIR: "choose another name: a folder has this one",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def system_error(error: OSError, where: str) -> InferflowError:
    """The refusal for what the system said about `where`, the file or stream as the user knows it."""
    fix = _REMEDIES.get(error.errno or 0, "check it, or choose another place")
    return InferflowError(error.strerror or str(error) or type(error).__name__, where=where, fix=fix)


class ArgumentError(InferflowError, ValueError):
    """A value given by the caller (flag, keyword, sampling parameter) is out of its range."""


class SpecError(InferflowError):
    """A model's TOML file is wrong; `where` is ``file:line:column``."""


class GraphError(SpecError):
    """A well-formed spec describes an impossible computation (shapes, unknown values)."""


class CheckpointError(InferflowError):
    """A model's files are corrupt, incomplete or do not fit the spec."""


class FetchError(InferflowError):
    """A model could not be found or downloaded."""


class TextError(InferflowError):
    """A tokenizer or chat template is missing, broken or refuses its input."""


class UnsupportedError(InferflowError):
    """A valid input that this engine does not serve (yet)."""


class QueueFullError(InferflowError):
    """There are too many requests waiting already: ask again later."""


class ClosedError(InferflowError):
    """The model is closed, or its engine has failed: nothing runs here any more."""


class DeadlineError(InferflowError):
    """A request's time was up before its answer was complete."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the closest of `known`, or an empty string."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else ""
