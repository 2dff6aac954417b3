"""The GGUF reference tokenizer, called through the C interface of the `xllamacpp` wheel, to make the golden files.

The wheel exports the library's C symbols; `ctypes` calls them, since the wheel's own Python classes do not tokenize.
The layout of the parameter structure is no part of that interface: `_VOCAB_ONLY` holds for the version named below.
"""

from __future__ import annotations

import ctypes
from importlib import metadata
from pathlib import Path

VERSION = "2026.10.11549"
_VOCAB_ONLY = 72  # offset of the flag `vocab_only` in the parameters of VERSION


class _Parameters(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * 512)]


class ReferenceTokenizer:
    """The vocabulary of one GGUF file."""

    def __init__(self, path: Path) -> None:
        if metadata.version("xllamacpp") != VERSION:
            raise RuntimeError(f"this script knows xllamacpp {VERSION} only: pip install xllamacpp=={VERSION}")
        import xllamacpp

        library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
        library.llama_model_default_params.restype = _Parameters
        library.llama_model_load_from_file.restype = ctypes.c_void_p
        library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Parameters]
        library.llama_model_get_vocab.restype = ctypes.c_void_p
        library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        library.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        library.llama_vocab_is_eog.restype = ctypes.c_bool
        library.llama_tokenize.argtypes = [
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32,
            ctypes.c_bool, ctypes.c_bool,
        ]  # fmt: skip
        library.llama_token_to_piece.argtypes = [
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool,
        ]  # fmt: skip
        library.llama_backend_init()
        self._silence(library)
        parameters = library.llama_model_default_params()
        parameters.data[_VOCAB_ONLY] = 1
        model = library.llama_model_load_from_file(str(path).encode(), parameters)
        if not model:
            raise RuntimeError(f"{path}: the reference refuses it")
        self._library = library
        self._vocab = library.llama_model_get_vocab(model)
        library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
        self.size: int = library.llama_vocab_n_tokens(self._vocab)

    def _silence(self, library: ctypes.CDLL) -> None:
        callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._log = callback(lambda level, text, data: None)
        library.llama_log_set.argtypes = [callback, ctypes.c_void_p]
        library.llama_log_set(self._log, None)

    def encode(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        room = len(text) + 8
        buffer = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(self._vocab, text, len(text), buffer, room, add_special, parse_special)
        if count < 0:
            raise RuntimeError("more tokens than bytes")
        return list(buffer[:count])

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(1024)
        count = self._library.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:count]

    def is_end(self, token: int) -> bool:
        return bool(self._library.llama_vocab_is_eog(self._vocab, token))
