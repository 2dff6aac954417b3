"""Tokenizers from real GGUF files: ids equal those of the GGUF reference, frozen in golden/ by make_golden.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from inferflow.text import Tokenizer, load_tokenizer
from inferflow.weights.open import open_source

from .hostile import NOT_UTF8
from .make_golden import GOLDEN, compact

SMOLLM2 = "smollm2-135m-instruct-q4_1"
GEMMA3 = "gemma3-270m-q4_k_m"
QWEN25 = "qwen2.5-coder-0.5b-instruct-q4_k_m"

# The reference turns some ordinary and user-defined tokens that look like a turn's end into control tokens. We keep the
# type that the vocabulary states, as the models' own tokenizers do: (model, text) whose ids differ for that reason.
OTHER_TYPE = {QWEN25: (b"</s>",), GEMMA3: (b"</s>",)}
# Bytes that are no UTF-8: the reference decodes overlong forms and surrogates, and takes as many bytes after a bad first
# byte as that byte promised, good ones included. We never do.
OTHER_BYTES = {
    SMOLLM2: (b"\xed\xa0\x80", b"\xc0\xaf"),
    QWEN25: (b"\xed\xa0\x80", b"\xc0\xaf"),
    GEMMA3: (b"a\xf0\x9f\x98b", b"ok \xfe\xff ok"),
}


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3, QWEN25])
def model(request: pytest.FixtureRequest) -> tuple[Tokenizer, dict[str, Any], str]:
    name: str = request.param
    if name == SMOLLM2:
        path = request.getfixturevalue("smollm2_path")
    else:
        folder = os.environ.get("INFERFLOW_MODELS") or Path.home() / ".cache" / "inferflow-models"
        path = Path(folder) / f"{name}.gguf"
        if not path.is_file():
            pytest.skip(f"{path} is not there")
    tokenizer = load_tokenizer(open_source(path), path)
    assert tokenizer is not None
    return tokenizer, json.loads((GOLDEN / f"{name}.json").read_text()), name


@pytest.mark.parametrize("parse_special", [False, True])
def test_ids_equal_the_reference(model: tuple[Tokenizer, dict[str, Any], str], parse_special: bool) -> None:
    tokenizer, golden, name = model
    compared = 0
    for entry in golden["texts"]:
        text, expected = bytes.fromhex(entry["text"]), entry["special" if parse_special else "plain"]
        other = text in OTHER_BYTES[name] or any(word in text for word in OTHER_TYPE.get(name, ()))
        if expected is None or other:
            continue
        ids = tokenizer.encode(text, parse_special=parse_special)
        bos = tokenizer.bos_id
        if isinstance(expected, list) and expected[:2] == [bos, bos]:
            expected = expected[1:]  # the reference doubles a BOS that the text begins with
        assert compact(ids) == expected, text
        compared += 1
    assert compared > 55


def test_pieces_equal_the_reference(model: tuple[Tokenizer, dict[str, Any], str]) -> None:
    tokenizer, golden, _ = model
    assert {token: tokenizer.piece(int(token)).hex() for token in golden["pieces"]} == golden["pieces"]


def test_user_text_never_becomes_a_control_token(model: tuple[Tokenizer, dict[str, Any], str]) -> None:
    tokenizer, golden, _ = model
    words = "".join(tokenizer.piece(token).decode() for token in sorted(tokenizer.special_ids)[:40])
    for text in [*(bytes.fromhex(entry["text"]) for entry in golden["texts"]), words.encode()]:
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text, add_bos=False)), text
    assert tokenizer.special_ids & set(tokenizer.encode(words, add_bos=False, parse_special=True))


def test_text_survives(model: tuple[Tokenizer, dict[str, Any], str]) -> None:
    tokenizer, golden, name = model
    for entry in golden["texts"]:
        raw = bytes.fromhex(entry["text"])
        if raw in NOT_UTF8:
            continue
        text = raw.decode()
        said = text.replace("\u2581", " ") if name == GEMMA3 else text
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == said


def test_ends(model: tuple[Tokenizer, dict[str, Any], str]) -> None:
    tokenizer, golden, name = model
    assert tokenizer.eos_ids == {SMOLLM2: {0, 2}, GEMMA3: {1, 106}, QWEN25: {151643, 151645}}[name]
    # the reference adds tokens that end no turn (file separators, and those of OTHER_TYPE)
    assert tokenizer.eos_ids < set(golden["ends"])
