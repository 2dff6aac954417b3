"""Mapping a checkpoint file and telling what it is: the ground that every source stands on.

Nothing here allocates by what a file says. `identify` names the impostors met in practice (a Git-LFS pointer, a web
page, an empty file, an archive, a superseded format) in the error, so that a user knows what he downloaded.
"""

from __future__ import annotations

import math
import mmap
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inferflow.errors import CheckpointError

__all__ = ["AGAIN", "Bytes", "check_shape", "corrupt", "identify", "map_file"]

Bytes = npt.NDArray[np.uint8]

AGAIN = "download the file again, or convert it again"

_HEAD = 512
_MAX_DIMS = 32
_MAX_ELEMENTS = 2**62

# First bytes of things that are not checkpoints, and what to do about each.
_IMPOSTORS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a Git-LFS pointer, not the model", "run 'git lfs pull', or download the file itself"),
    (b"lmgg", "an old GGML file (before GGUF)", "download or convert the model as GGUF"),
    (b"fmgg", "an old GGML file ('ggmf', before GGUF)", "download or convert the model as GGUF"),
    (b"tjgg", "an old GGML file ('ggjt', before GGUF)", "download or convert the model as GGUF"),
    (b"algg", "an old GGML adapter file ('ggla')", "merge the adapter into its model and convert that to GGUF"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it first"),
    (b"\xfd7zXZ", "an xz archive", "unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it first"),
    (b"PK\x05\x06", "an empty zip archive", AGAIN),
    (b"\x89HDF", "an HDF5 file", "convert the model to safetensors"),
    (b"\x93NUMPY", "a NumPy array file", "convert the model to safetensors"),
)
_MARKUP = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<error")
_KINDS: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "gguf"),
    (b"FUGG", "gguf"),
    (b"PK\x03\x04", "zip"),
    (b"24ka", "l2c"),
)


def corrupt(where: str | Path, reason: str, fix: str = AGAIN) -> CheckpointError:
    """The one way this package refuses a file."""
    return CheckpointError(reason, where=str(where), fix=fix)


def regular_size(path: Path) -> int:
    """Size in bytes of a regular file; CheckpointError for anything else (a pipe would block, a device lies)."""
    try:
        info = path.stat()
    except (OSError, ValueError) as error:
        raise corrupt(path, f"cannot be opened: {_why(error)}", "check the path and its permissions") from None
    if not stat.S_ISREG(info.st_mode):
        raise corrupt(path, "is not a regular file", "give a model file or a model directory")
    if info.st_size == 0:
        raise corrupt(path, "the file is empty", AGAIN)
    return info.st_size


def map_file(path: Path) -> Bytes:
    """The whole file as a read-only uint8 array over its mapped pages; nothing is read yet.

    Sizes are checked against the file as it is now. If another program truncates it while it is mapped, reading a page that
    is gone ends the process with SIGBUS: replace a model that is in use by renaming a new file over it, never in place.
    """
    regular_size(path)
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise corrupt(path, f"cannot be mapped: {_why(error)}", "check the file's permissions") from None


def identify(path: Path) -> str:
    """What a file's first bytes say it is: ``gguf``, ``safetensors``, ``zip``, ``pickle``, ``l2c`` or ``unknown``.

    Raises CheckpointError for a known impostor, with its name in the reason.
    """
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise corrupt(path, f"cannot be read: {_why(error)}", "check the file's permissions") from None
    for magic, name, fix in _IMPOSTORS:
        if head.startswith(magic):
            raise corrupt(path, f"this is {name}", fix)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_MARKUP):
        raise corrupt(
            path,
            "this is a web page (HTML or XML), not a model",
            "the site answered with a page: log in or correct the link, and download again",
        )
    if head[257:262] == b"ustar":
        raise corrupt(path, "this is a tar archive", "unpack it first")
    for magic, kind in _KINDS:
        if head.startswith(magic):
            return kind
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "safetensors"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    return "unknown"


def check_shape(shape: Sequence[Any], where: str) -> tuple[tuple[int, ...], int]:
    """A stored shape as a tuple and its element count, both proven small enough for NumPy to address.

    Dimensions must be plain non-negative integers. The product of the dimensions other than zero is bounded as well: an
    array of shape (2**62, 2**62, 0) has no elements and still cannot be made.
    """
    if len(shape) > _MAX_DIMS:
        raise corrupt(where, f"has {len(shape)} dimensions; at most {_MAX_DIMS} are possible")
    span = 1
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise corrupt(where, f"has a dimension {_short(dim)} that is not a non-negative integer")
        span *= dim or 1
        if span > _MAX_ELEMENTS:
            raise corrupt(where, "has a shape whose size overflows")
    return tuple(shape), math.prod(shape)


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 2**64:
        return "beyond 64 bits"  # str() of a huge int is slow, or an error
    if not isinstance(value, (int, float, str)):
        return f"({type(value).__name__})"  # repr() of nested containers may be endless
    return repr(value)[:40]


def _why(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
