"""llama.cpp as a peer, through the C symbols that the `xllamacpp` wheel exports; its own Python classes know a server only.

Measured as its own benchmark does: random tokens, no sampling, flash attention as it decides itself, weights repacked for
the CPU where it can.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .peers import Batched, Floats

__all__ = ["LlamaCpp", "quantize_rows"]

VERSION = "2026.10.11549"  # the layout of the structures below is this version's, and that of llama-cpp-python 0.3.36

Ints = npt.NDArray[np.int32]


class _ModelParameters(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * 512)]  # passed as they come


class _ContextParameters(ctypes.Structure):
    _fields_ = [
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("untouched", ctypes.c_uint32 * 3),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("rest", ctypes.c_ubyte * 476),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (_ModelParameters, []),
    "llama_model_load_from_file": (_POINTER, [ctypes.c_char_p, _ModelParameters]),
    "llama_model_get_vocab": (_POINTER, [_POINTER]),
    "llama_vocab_n_tokens": (_INT, [_POINTER]),
    "llama_tokenize": (
        _INT,
        [_POINTER, ctypes.c_char_p, _INT, _POINTER, _INT, ctypes.c_bool, ctypes.c_bool],
    ),
    "llama_context_default_params": (_ContextParameters, []),
    "llama_init_from_model": (_POINTER, [_POINTER, _ContextParameters]),
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_memory_clear": (None, [_POINTER, ctypes.c_bool]),
    "llama_decode": (_INT, [_POINTER, _Batch]),
    "llama_synchronize": (None, [_POINTER]),
    "llama_get_logits": (_POINTER, [_POINTER]),
    "ggml_row_size": (ctypes.c_size_t, [_INT, _LONG]),
    "ggml_quantize_chunk": (ctypes.c_size_t, [_INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER]),
}
_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_silent = _LogCallback(lambda level, text, data: None)  # kept here: the library calls it for good


def _wheel() -> str:
    """The path of xllamacpp's library; RuntimeError for another version than the one known here."""
    if metadata.version("xllamacpp") != VERSION:
        raise RuntimeError(f"only xllamacpp {VERSION} is known here: pip install xllamacpp=={VERSION}")
    import xllamacpp  # type: ignore[import-untyped]

    return str(next(Path(xllamacpp.__file__).parent.glob("*.so")))


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, with its functions declared: the one that LLAMA_CPP_LIBRARY names, else the wheel's."""
    library = ctypes.CDLL(os.environ.get("LLAMA_CPP_LIBRARY") or _wheel())
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set.argtypes = [_LogCallback, ctypes.c_void_p]
    library.llama_log_set(_silent, None)
    library.llama_backend_init()
    return library


def quantize_rows(rows: Floats, kind: int) -> npt.NDArray[np.uint8]:
    """``[rows, bytes]``: the rows in ggml's block type number `kind`, rounded as llama.cpp does without importance data.
    Their length must be a multiple of the type's block."""
    count, width = rows.shape
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty((count, _library().ggml_row_size(kind, width)), np.uint8)
    written = _library().ggml_quantize_chunk(kind, rows.ctypes.data, out.ctypes.data, 0, count, width, None)
    if written != out.nbytes:
        raise ValueError(f"{written} bytes of type {kind} came back, {out.nbytes} were wanted")
    return out


class _Tokens:
    """A batch, and the arrays that it points into. Token i is number `positions[i]` of sequence `sequences[i]`;
    `wanted` are the tokens whose logits are computed."""

    def __init__(self, tokens: Ints, positions: Ints, sequences: Ints, wanted: npt.NDArray[np.int8]) -> None:
        ids = np.ascontiguousarray(sequences, np.int32)
        pointers = ids.ctypes.data + ids.itemsize * np.arange(len(ids), dtype=np.uintp)
        tokens, positions = np.ascontiguousarray(tokens, np.int32), np.ascontiguousarray(positions, np.int32)
        self._kept = arrays = (tokens, positions, np.ones(len(ids), np.int32), pointers, wanted, ids)
        token, pos, counts, seq, logits = (array.ctypes.data for array in arrays[:5])
        self.batch = _Batch(len(ids), token, None, pos, counts, seq, logits)


def _chunk(tokens: Ints, start: int, limit: int) -> list[_Tokens]:
    """Batches of at most `limit` tokens for ``[sequences, length]`` tokens from position `start` on, sequence after
    sequence; logits of each one's last."""
    count, length = tokens.shape
    positions = np.tile(np.arange(start, start + length, dtype=np.int32), count)
    sequences = np.repeat(np.arange(count, dtype=np.int32), length)
    wanted = np.tile((np.arange(length) == length - 1).astype(np.int8), count)
    parts = [slice(at, at + limit) for at in range(0, count * length, limit)]
    return [_Tokens(tokens.reshape(-1)[p], positions[p], sequences[p], wanted[p]) for p in parts]


class LlamaCpp:
    """A `Scorer`."""

    batch = 2048  # tokens of a call, llama.cpp's default

    def __init__(self, path: str, threads: int) -> None:
        self._library, self._threads = _library(), threads
        self._model = self._library.llama_model_load_from_file(
            path.encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("llama.cpp cannot load it")
        self._vocab = self._library.llama_model_get_vocab(self._model)
        self._size: int = self._library.llama_vocab_n_tokens(self._vocab)
        self._contexts: dict[tuple[int, int], int] = {}
        self._rng = np.random.default_rng()

    def prefill(self, tokens: int) -> float:
        context = self._empty(1, tokens)
        return tokens / self._seconds(context, _chunk(self._random(1, tokens), 0, self.batch))

    def decode(self, tokens: int, context: int) -> float:
        return self.batched(1, context, tokens).decode

    def batched(self, sequences: int, prompt: int, output: int) -> Batched:
        context = self._empty(sequences, prompt + output)
        prompts = _chunk(self._random(sequences, prompt), 0, self.batch)
        steps = [_chunk(self._random(sequences, 1), prompt + n, self.batch)[0] for n in range(output)]
        first, rest = self._seconds(context, prompts), self._seconds(context, steps)
        return Batched(sequences * prompt / first, sequences * output / rest, sequences * output / (first + rest))

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        buffer = np.empty(len(raw) + 8, np.int32)
        count = self._library.llama_tokenize(self._vocab, raw, len(raw), buffer.ctypes.data, len(buffer), True, False)
        return [int(token) for token in buffer[:count]]

    def logits(self, tokens: Sequence[int], first: int) -> Floats:
        count, context = len(tokens), self._empty(1, len(tokens))
        if count > self.batch:
            raise ValueError(f"{count} tokens are more than a batch of {self.batch}")
        positions = np.arange(count, dtype=np.int32)
        wanted = (positions >= first).astype(np.int8)
        self._run(context, _Tokens(np.array(tokens, np.int32), positions, np.zeros(count, np.int32), wanted))
        values = ctypes.cast(self._library.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        copy: Floats = np.ctypeslib.as_array(values, (count - first, self._size)).copy()
        return copy

    def _empty(self, sequences: int, length: int) -> int:
        """A context that holds nothing, with room for these sequences; made once, since that costs time."""
        room = -(-length // 256) * 256
        if (sequences, room) not in self._contexts:
            parameters = self._library.llama_context_default_params()
            parameters.n_ctx, parameters.n_seq_max, parameters.n_batch = sequences * room, sequences, self.batch
            parameters.n_threads = parameters.n_threads_batch = self._threads
            context = self._library.llama_init_from_model(self._model, parameters)
            if not context:
                raise RuntimeError(f"no context for {sequences} sequences of {room} tokens")
            self._contexts[sequences, room] = context
        context = self._contexts[sequences, room]
        self._library.llama_memory_clear(self._library.llama_get_memory(context), False)
        return context

    def _random(self, sequences: int, length: int) -> Ints:
        return self._rng.integers(0, self._size, (sequences, length), dtype=np.int32)

    def _seconds(self, context: int, batches: list[_Tokens]) -> float:
        start = time.perf_counter()
        for batch in batches:
            self._run(context, batch)
        return time.perf_counter() - start

    def _run(self, context: int, tokens: _Tokens) -> None:
        if status := self._library.llama_decode(context, tokens.batch):
            raise RuntimeError(f"llama_decode gave {status}")
        self._library.llama_synchronize(context)
