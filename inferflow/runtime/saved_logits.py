"""A model's logits on the scored positions of a text, in a file, so that other models can be compared with it later.

The file is a safetensors file of two tensors: ``tokens``, I32 [windows, ctx], and ``logits``, F32 [windows, scored positions,
vocab]. It is written window by window and mapped when read, so neither end holds more than a window in memory.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import ArgumentError
from ..weights.files import corrupt, map_file
from ..weights.output import PREFIX, writing
from ..weights.safetensors import parse_header
from .evaluate import MIN_CTX, scored

__all__ = ["LogitsWriter", "SavedLogits", "writing_logits"]

FIX = "save the logits again: inferflow perplexity --save-logits FILE"


class LogitsWriter:
    """Takes one window's logits after the other; `path` is what `file` will be."""

    def __init__(self, path: Path, file: BinaryIO, windows: np.ndarray, vocab: int) -> None:
        self._path = path
        self._file = file
        self._shape = _shape(windows, vocab)
        tensors = {"tokens": ("I32", windows.shape), "logits": ("F32", self._shape)}
        header, at = {}, 0
        for name, (kind, shape) in tensors.items():
            end = at + 4 * math.prod(shape)
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text + windows.astype("<i4").tobytes())

    def add(self, logits: np.ndarray) -> None:
        """float32 [scored positions, vocab] of the next window."""
        if logits.shape != self._shape[1:]:
            raise ValueError(f"{logits.shape} is not {self._shape[1:]}")
        with writing(self._path):
            self._file.write(np.ascontiguousarray(logits, "<f4").data)


@contextmanager
def writing_logits(path: Path, windows: np.ndarray, vocab: int) -> Iterator[LogitsWriter]:
    """A `LogitsWriter` for `windows`, int32 [windows, ctx]. The file is there only when all has gone well; one that is there
    already is not touched (ArgumentError). InferflowError where the system does not let it be written."""
    _check_new(path)
    part = path.with_name(f"{PREFIX}{secrets.token_hex(8)}")
    with writing(path):
        file = part.open("xb")  # of our own: neither another's file nor where a link leads
    try:
        with writing(path):
            writer = LogitsWriter(path, file, windows, vocab)
        yield writer
        with writing(path):
            file.close()  # what is buffered may not fit
            _check_new(path)
            part.rename(path)
    finally:
        with suppress(OSError):
            file.close()
        part.unlink(missing_ok=True)


def _check_new(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise ArgumentError("the file exists", where=str(path), fix="choose another name, or remove it")


class SavedLogits:
    """Saved logits, proven whole on opening (CheckpointError). `windows` is int32 [windows, ctx]; `vocab` the vocabulary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = map_file(path)
        slots = parse_header(data, path)
        kinds = {name: (slot.info.dtype, len(slot.info.shape)) for name, slot in slots.items()}
        if kinds != {"tokens": ("I32", 2), "logits": ("F32", 3)}:
            raise corrupt(path, "holds no saved logits", FIX)
        tokens, logits = slots["tokens"], slots["logits"]
        self.windows: np.ndarray = data[tokens.begin : tokens.end].view("<i4").reshape(tokens.info.shape)
        self.vocab = logits.info.shape[2]
        count, ctx = tokens.info.shape
        if not count or ctx < MIN_CTX or not self.vocab or logits.info.shape != _shape(self.windows, self.vocab):
            reason = f"has logits of shape {list(logits.info.shape)} for tokens of shape {list(self.windows.shape)}"
            raise corrupt(path, reason, FIX)
        self._logits: np.ndarray = data[logits.begin : logits.end].view("<f4").reshape(logits.info.shape)

    def check(self, windows: np.ndarray, vocab: int) -> None:
        """ArgumentError unless these are the logits of `windows`, int32 [windows, ctx], or of more of the same text."""
        (have, ctx), (want, asked) = self.windows.shape, windows.shape
        if ctx != asked:
            raise self._unlike(f"its windows have {ctx} tokens, not {asked}", f"give --ctx {ctx}")
        if vocab != self.vocab:
            fix = "compare models of one vocabulary"
            raise self._unlike(f"its vocabulary has {self.vocab} tokens, the model's {vocab}", fix)
        if not np.array_equal(self.windows[:want], windows[:have]):
            raise self._unlike("it was made of another text, or of other tokens", "save the logits of this text")
        if have < want:
            raise self._unlike(f"it holds {have} windows, and {want} are evaluated", f"give --windows {have}")

    def _unlike(self, reason: str, fix: str) -> ArgumentError:
        return ArgumentError(reason, where=str(self.path), fix=fix)

    def window(self, number: int) -> np.ndarray:
        """float32 [scored positions, vocab], a view of the mapped file."""
        return self._logits[number]


def _shape(windows: np.ndarray, vocab: int) -> tuple[int, int, int]:
    count, ctx = windows.shape
    positions = scored(ctx)
    return count, positions.stop - positions.start, vocab
