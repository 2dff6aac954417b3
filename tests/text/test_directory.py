"""Tokenizers from directories: ids and texts equal those of `transformers`, for every kind of vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferflow.errors import TextError
from inferflow.text import Tokenizer, load_tokenizer

from .hostile import TEXTS
from .small import ENGINES, save

HOSTILE = [text.decode() for text in TEXTS]


@pytest.fixture(scope="module", params=sorted(ENGINES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any, str]:
    from transformers import PreTrainedTokenizerFast

    folder = save(ENGINES[request.param](), tmp_path_factory.mktemp(request.param))
    tokenizer = load_tokenizer(None, folder)
    assert tokenizer is not None
    return tokenizer, PreTrainedTokenizerFast.from_pretrained(str(folder)), request.param


def test_ids_equal_transformers(pair: tuple[Tokenizer, Any, str]) -> None:
    ours, theirs, _ = pair
    for text in HOSTILE:
        assert ours.encode(text, parse_special=True, add_bos=False) == theirs.encode(text, add_special_tokens=False), (
            text
        )


def test_declared_surroundings_equal_transformers(pair: tuple[Tokenizer, Any, str]) -> None:
    ours, theirs, _ = pair
    for text in HOSTILE:
        if not text.startswith("<s>"):
            assert ours.encode(text, parse_special=True) == theirs.encode(text), text


def test_user_text_equals_transformers_with_split_specials(pair: tuple[Tokenizer, Any, str]) -> None:
    ours, theirs, kind = pair
    control = ours.special_ids - {ours.token_id("<unk>")}
    differing = []
    for text in HOSTILE:
        ids = ours.encode(text, add_bos=False)
        assert control.isdisjoint(ids), text
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        if ids != expected:
            differing.append(text)
            # only where the reference itself lets the text become a control token
            assert not control.isdisjoint(expected), text
    assert kind in ("unigram", "sentencepiece") or not differing


def test_text_survives_where_the_vocabulary_can_say_it(pair: tuple[Tokenizer, Any, str]) -> None:
    ours, theirs, kind = pair
    for text in HOSTILE:
        ids = ours.encode(text, add_bos=False)
        if kind in ("byte_level", "sentencepiece"):
            said = text.replace("\u2581", " ") if kind == "sentencepiece" else text
            assert ours.decode(ids) == said
        else:
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_skip_special(pair: tuple[Tokenizer, Any, str]) -> None:
    ours, _, _ = pair
    ids = ours.encode("<s>hi</s>", parse_special=True, add_bos=False)
    assert "<s>" not in ours.decode(ids)
    assert "</s>" not in ours.decode(ids)
    assert ours.decode(ids, skip_special=False).startswith("<s>")


def test_padding_of_the_vocabulary_has_no_text(pair: tuple[Tokenizer, Any, str]) -> None:
    ours, _, _ = pair
    assert ours.piece(ours.vocab_size + 5) == b""
    with pytest.raises(TextError, match="negative"):
        ours.piece(-1)


def test_ends_are_the_union_of_all_files(tmp_path: Path) -> None:
    folder = save(ENGINES["byte_level"](), tmp_path)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [30, 31]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 32}))
    tokenizer = load_tokenizer(None, folder)
    assert tokenizer is not None
    named = {tokenizer.token_id("</s>"), tokenizer.token_id("<|im_end|>")}
    assert tokenizer.eos_ids == {30, 31, 32} | named


def test_a_word_that_is_no_control_token_ends_nothing(tmp_path: Path) -> None:
    engine = ENGINES["byte_level"]()
    engine.add_tokens(["<|eot_id|>"])
    tokenizer = load_tokenizer(None, save(engine, tmp_path))
    assert tokenizer is not None
    assert tokenizer.token_id("<|eot_id|>") is not None
    assert tokenizer.token_id("<|eot_id|>") not in tokenizer.eos_ids


@pytest.mark.parametrize("flag", [True, False])
def test_the_post_processor_wins_over_the_configuration(tmp_path: Path, flag: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = save(ENGINES["sentencepiece"](), tmp_path, add_bos_token=flag)
    tokenizer = load_tokenizer(None, folder)
    assert tokenizer is not None
    assert tokenizer.encode("a") == PreTrainedTokenizerFast.from_pretrained(str(folder)).encode("a")


@pytest.mark.parametrize("flag", [True, False])
def test_configured_bos_without_a_post_processor(tmp_path: Path, flag: bool) -> None:
    tokenizer = load_tokenizer(None, save(ENGINES["byte_level"](), tmp_path, add_bos_token=flag))
    assert tokenizer is not None
    assert (tokenizer.encode("a")[0] == tokenizer.bos_id) is flag


def test_bos_is_never_doubled(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(None, save(ENGINES["sentencepiece"](), tmp_path))
    assert tokenizer is not None
    once = tokenizer.encode("<s>a", parse_special=True)
    assert once.count(tokenizer.bos_id or 0) == 1
    assert tokenizer.encode("<s>a", parse_special=True, add_bos=True) == once
    assert tokenizer.encode("a", add_bos=False).count(tokenizer.bos_id or 0) == 0


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "J", "tokenizer_config.json": '{"chat_template": "C"}'}, "J"),
        ({"chat_template.json": '{"chat_template": "K"}', "tokenizer_config.json": '{"chat_template": "C"}'}, "K"),
        ({"tokenizer_config.json": '{"chat_template": "C"}'}, "C"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "D"}]}'}, "D"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "other", "template": "D"}]}'}, None),
        ({}, None),
    ],
)
def test_chat_template_of_a_directory(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    folder = save(ENGINES["byte_level"](), tmp_path)
    for name, text in files.items():
        (folder / name).write_text(text)
    tokenizer = load_tokenizer(None, folder)
    assert tokenizer is not None
    assert tokenizer.chat_template == expected


@pytest.mark.parametrize(
    "broken", ["", "{}", "[1]", "{" * 100_000, '{"version": "1.0", "model": {"type": "BPE"}}', "\x00"]
)
def test_a_broken_tokenizer_is_refused(tmp_path: Path, broken: str) -> None:
    (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(TextError, match=r"tokenizer\.json"):
        load_tokenizer(None, tmp_path)


@pytest.mark.parametrize("broken", ["", "[]", "[" * 100_000, "{"])
def test_a_broken_config_is_refused(tmp_path: Path, broken: str) -> None:
    folder = save(ENGINES["byte_level"](), tmp_path)
    (folder / "tokenizer_config.json").write_text(broken)
    with pytest.raises(TextError, match=r"tokenizer_config\.json"):
        load_tokenizer(None, folder)


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(None, tmp_path) is None
