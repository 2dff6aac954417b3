"""Small GGUF vocabularies, one for every pre-tokenizer and kind: ids equal the GGUF reference's (golden/tiny.json).

The byte-level vocabulary was trained without a pre-tokenizer, so a text cut elsewhere has other ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from inferflow.errors import TextError
from inferflow.text import Tokenizer
from inferflow.text.gguf_vocab import load_gguf
from inferflow.text.tables import Pretokenizer, pretokenizer, pretokenizer_names

from .hostile import TEXTS
from .make_golden import GOLDEN, digest

DATA: dict[str, Any] = json.loads((GOLDEN / "tiny.json").read_text())
BPE: dict[str, Any] = DATA["bpe"]["metadata"]

# The reference approximates these models' published expressions: it takes upper- and lower-case classes for "not a-z" and
# "not A-Z" letters without marks, and sees every Unicode blank as one. We keep the published expressions.
MARKS = ("\u0e31", "\u0651", "\u05b8", "\u0301", "\u0351")
DIFFERENT = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), MARKS),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), ("CamelCaseHTTPServer",)),
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), ("\u3000ideographic",)),
}


Ids = dict[str, list[list[int]]]


def encode_all(tokenizer: Tokenizer) -> Ids:
    return {
        name: [tokenizer.encode(text, parse_special=parsed) for text in TEXTS]
        for name, parsed in (("plain", False), ("special", True))
    }


def differing(ids: Ids, expected: dict[str, list[str]], bos: int | None) -> list[str]:
    found = []
    for name in ("plain", "special"):
        for text, got, wanted in zip(TEXTS, ids[name], expected[name], strict=True):
            # the reference doubles a BOS that the text begins with
            doubled = got[:1] == [bos] and digest([got[0], *got]) == wanted
            if digest(got) != wanted and not doubled:
                found.append(text.decode())
    return found


@pytest.fixture(scope="module")
def ids_of() -> Callable[[str], Ids]:
    """The ids of all texts by pre-tokenizer; many names mean the same one."""
    known: dict[Pretokenizer, Ids] = {}

    def find(pre: str) -> Ids:
        rules = pretokenizer(pre, where="tiny")
        if rules not in known:
            known[rules] = encode_all(load_gguf({**BPE, "tokenizer.ggml.pre": pre}, where="tiny"))
        return known[rules]

    return find


@pytest.mark.parametrize("pre", pretokenizer_names())
def test_every_pretokenizer_equals_the_reference(pre: str, ids_of: Callable[[str], Ids]) -> None:
    for text in differing(ids_of(pre), DATA["bpe"]["ids"][pre], bos=0):
        assert any(part in text for part in DIFFERENT.get(pre, ())), text


def test_pretokenizers_do_differ() -> None:
    distinct = {json.dumps(ids) for ids in DATA["bpe"]["ids"].values()}
    assert len(distinct) >= 18


@pytest.mark.parametrize("name", sorted(DATA["others"]))
def test_other_kinds_equal_the_reference(name: str) -> None:
    entry = DATA["others"][name]
    found = differing(encode_all(load_gguf(entry["metadata"], where="tiny")), entry, bos=1)
    # of segmentations that score the same the unigram model of the library takes another
    assert set(found) <= ({" " * 10_000} if name.startswith("t5") else set())


def test_sentencepiece_equals_the_library_it_is_named_after(tmp_path: Any) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    from .tiny import from_pieces, trained

    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    pieces = trained(tmp_path, "bpe", vocab_size=700, byte_fallback=True, **options)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "bpe.model"))
    ours = load_gguf(from_pieces(pieces, "llama"), where="tiny")
    for text in (text.decode() for text in TEXTS):
        if "\u2581" not in text and "\x00" not in text:
            assert ours.encode(text, add_bos=False) == theirs.encode(text), text
            assert ours.decode(ours.encode(text)) == text


def test_an_unknown_pretokenizer_is_named_and_can_be_overridden() -> None:
    metadata = {**BPE, "tokenizer.ggml.pre": "qwen22"}
    with pytest.raises(
        TextError, match=r"model\.gguf: unknown pre-tokenizer 'qwen22'.*did you mean 'qwen2'.*gpt-2.*smollm"
    ):
        load_gguf(metadata, where="model.gguf")
    overridden = load_gguf(metadata, where="model.gguf", pretokenizer="qwen2")
    named = load_gguf({**BPE, "tokenizer.ggml.pre": "qwen2"}, where="model.gguf")
    assert overridden.encode("it's 1234") == named.encode("it's 1234")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "nope"}, r"unknown tokenizer\.ggml\.model 'nope'"),
        ({"tokenizer.ggml.model": "bert"}, "wordpiece"),
        ({"tokenizer.ggml.tokens": []}, "empty"),
        ({"tokenizer.ggml.tokens": "abc"}, "not an array"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "other than strings"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": [1]}, "other than strings"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "merges"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "no token id"),
        ({"tokenizer.ggml.model": "llama"}, "scores has 0 entries"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [float("nan")] * 9_999}, "numbers"),
        ({"tokenizer.ggml.model": "t5", "tokenizer.ggml.scores": ["x"] * 9_999}, "numbers"),
    ],
)
def test_broken_metadata_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(TextError, match=reason):
        load_gguf({**BPE, **change}, where="model.gguf")


def test_ids_outside_the_vocabulary_are_no_ends() -> None:
    changed = {"tokenizer.ggml.eos_token_id": 10**6, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    assert load_gguf({**BPE, **changed}, where="x").eos_ids == {1, 5, 6}  # 1 is <|im_end|>, a control token


def test_declared_surroundings() -> None:
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load_gguf({**BPE, **both}, where="x")
    ids = tokenizer.encode("hi")
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.encode("hi", add_bos=True) == ids[:-1]
    assert tokenizer.encode("hi", add_bos=False) == ids[1:-1]
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.encode("<|begin|>hi", parse_special=True) == ids


def test_no_merges_make_a_control_token() -> None:
    """A hostile file whose merges spell a control token: its text stays text."""
    text = next(
        word for merge in BPE["tokenizer.ggml.merges"] if (word := merge.replace(" ", "")).isalpha() and word.isascii()
    )
    token = BPE["tokenizer.ggml.tokens"].index(text)
    types = [*BPE["tokenizer.ggml.token_type"]]
    types[token] = 3
    hostile = {**BPE, "tokenizer.ggml.token_type": types}
    tokenizer = load_gguf(hostile, where="x")
    assert token in load_gguf(BPE, where="x").encode(text)
    assert token not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text * 2)) == text * 2
    assert tokenizer.encode(text, parse_special=True) == [token]
