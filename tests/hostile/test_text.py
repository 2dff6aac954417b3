"""The files beside a tokenizer.json, with anything in them: a tokenizer that works, or one InferflowError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from inferflow.errors import InferflowError, TextError
from inferflow.text import encode_chat, load_tokenizer

VALUES: list[Any] = [
    "x", "", 5, -1, 1.5, True, None, [], [1], ["x"], [None], {}, {"a": 1}, {"content": 5}, [{"content": "<s>"}], {"5": "x"},
    {"-1": {"content": "z"}}, {"999999999999": {"content": "z", "special": True}}, "\ud800", "</s>" * 1000, [[[]]], [[1], 2],
    {"300": {"content": "z", "special": "x", "lstrip": 5}}, {"content": "\ud800"}, 10**30, "{{ 1/0 }}", "{% for %}",
    "{{ x.y.z }}",
]  # fmt: skip
KEYS = {
    "tokenizer_config.json": [
        "bos_token", "eos_token", "unk_token", "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder",
        "chat_template", "add_bos_token", "add_eos_token",
    ],
    "special_tokens_map.json": ["eos_token", "bos_token", "additional_special_tokens"],
    "config.json": ["eos_token_id", "bos_token_id", "text_config"],
    "generation_config.json": ["eos_token_id"],
    "chat_template.json": ["chat_template"],
}  # fmt: skip
BYTES = [
    b"\xff\xfe",
    b"",
    b"[1]",
    b"null",
    b'{"a":' * 3000,
    b"\0",
    b'"\\ud800"',
    b"9" * 5000,
    b'{"x":' + b"9" * 5000 + b"}",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Bytes as tokens, and two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Engine(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    engine.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    engine.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def works_or_refuses(folder: Path) -> None:
    try:
        tokenizer = load_tokenizer(None, folder)
        assert tokenizer is not None
        ids = tokenizer.encode("hello </s> é", add_bos=False)
        assert tokenizer.decode(ids) == "hello </s> é"
        for token in tokenizer.eos_ids:
            tokenizer.piece(token)
        if tokenizer.chat_template:
            encode_chat(tokenizer, [{"role": "user", "content": "hi"}])
    except InferflowError as error:
        said = str(error)
    else:
        return
    assert said.endswith(")")


@pytest.mark.parametrize("name", KEYS)
def test_any_value_of_any_key(name: str, folder: Path) -> None:
    for key in KEYS[name]:
        for value in VALUES:
            (folder / name).write_text(json.dumps({key: value}))
            works_or_refuses(folder)


@pytest.mark.parametrize("name", [*KEYS, "chat_template.jinja"])
def test_any_bytes(name: str, folder: Path) -> None:
    for data in BYTES:
        (folder / name).write_bytes(data)
        works_or_refuses(folder)


def test_a_template_that_is_not_text_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TextError, match=r"chat_template\.jinja: cannot be read"):
        load_tokenizer(None, folder)
