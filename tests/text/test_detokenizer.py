"""Incremental decoding equals decoding at once, for every kind of vocabulary and any ids at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferflow.errors import TextError
from inferflow.text import Detokenizer, Tokenizer, load_tokenizer

from .hostile import TEXTS
from .small import ENGINES, save

_KINDS = sorted(ENGINES)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found = {kind: load_tokenizer(None, save(ENGINES[kind](), tmp_path_factory.mktemp(kind))) for kind in _KINDS}
    return {kind: tokenizer for kind, tokenizer in found.items() if tokenizer is not None}


def stream(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 1300), max_size=40),
    kind=st.sampled_from(_KINDS),
    skip_special=st.booleans(),
)
def test_stream_equals_whole(tokenizers: dict[str, Tokenizer], ids: list[int], kind: str, skip_special: bool) -> None:
    tokenizer = tokenizers[kind]
    assert stream(tokenizer, ids, skip_special) == tokenizer.decode(ids, skip_special)


@settings(deadline=None)
@given(data=st.binary(max_size=40), kind=st.sampled_from(["byte_level", "sentencepiece"]))
def test_any_bytes_come_out_as_python_replaces_them(tokenizers: dict[str, Tokenizer], data: bytes, kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids_of = {tokenizer.piece(token): token for token in range(tokenizer.vocab_size - 1, 4, -1)}
    first = [ids_of[b"x"]]
    ids = first + [ids_of[bytes([byte])] for byte in data]
    assert stream(tokenizer, ids, True) == (b"x" + data).decode("utf-8", "replace")


@pytest.mark.parametrize("kind", _KINDS)
def test_hostile_texts(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert stream(tokenizer, ids, True) == tokenizer.decode(ids)


def test_text_is_not_delayed(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids_of = {tokenizer.piece(token): token for token in range(tokenizer.vocab_size - 1, 4, -1)}
    detokenizer = Detokenizer(tokenizer)
    got = [detokenizer.push(ids_of[bytes([byte])]) for byte in "a\u00e9\U0001f600b".encode()]
    assert got == ["a", "", "\u00e9", "", "", "", "\U0001f600", "b"]
    assert detokenizer.flush() == ""


def test_leading_space(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    ids = tokenizer.encode("Hello")
    assert tokenizer.decode(ids) == "Hello"
    assert stream(tokenizer, ids, True) == "Hello"
    continued = Detokenizer(tokenizer, continuation=True)
    assert "".join(map(continued.push, ids)) == " Hello"
    assert stream(tokenizer, tokenizer.encode("  two"), True) == "  two"


def test_flush_begins_a_new_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("Hello")
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "Hello"
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "Hello"


def test_ids_outside_the_vocabulary(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    detokenizer = Detokenizer(tokenizers["byte_level"])
    assert detokenizer.push(10_000_000) == ""
    with pytest.raises(TextError):
        detokenizer.push(-5)
