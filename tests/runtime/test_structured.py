"""Structured output: masks that hold an answer to its structure, for every alphabet of tokens; hostile sources are refused."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferflow.errors import ArgumentError, InferflowError, UnsupportedError
from inferflow.runtime.sampler import Sampled, SamplerState, SamplingParams, sample
from inferflow.runtime.structured import Structure, StructureCompiler
from inferflow.text import Tokenizer, load_tokenizer
from inferflow.text.gguf_vocab import load_gguf
from inferflow.weights.open import open_source
from tests.text.tiny import from_pieces, trained

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def compiler(tokenizer: Tokenizer) -> StructureCompiler:
    return StructureCompiler.of(tokenizer, tokenizer.eos_ids)


@pytest.fixture(scope="module")
def byte_level(smollm2_path: Path) -> Tokenizer:
    source = open_source(smollm2_path)
    made = load_tokenizer(source, smollm2_path)
    source.close()
    assert made is not None
    return made


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = trained(tmp_path_factory.mktemp("pieces"), "bpe", vocab_size=700, byte_fallback=True)
    return load_gguf(from_pieces(found, "llama"), where="tiny")


@pytest.fixture(params=["byte_level", "pieces"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made: Tokenizer = request.getfixturevalue(request.param)
    return made


def answer(tokenizer: Tokenizer, params: SamplingParams, structure: Structure, seed: int, most: int = 400) -> str:
    """What comes of noise for logits: the structure alone decides."""
    state = SamplerState(params, [1], seed, ends=tokenizer.eos_ids, constraint=structure)
    rng = np.random.default_rng(seed)
    for _ in range(most):
        logits = rng.standard_normal((1, tokenizer.vocab_size + 7)).astype(np.float32)  # a padded vocabulary
        sampled = sample(logits, [state])[0]
        assert isinstance(sampled, Sampled), sampled
        if sampled.token in tokenizer.eos_ids:
            return tokenizer.decode_bytes(state.ids[1:]).decode()
        assert sampled.token not in tokenizer.special_ids
        state.push(sampled)
    raise AssertionError("no end")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_noise_becomes_what_was_asked_for(tokenizer: Tokenizer, temperature: float) -> None:
    make = compiler(tokenizer)
    for seed in range(3):
        params = SamplingParams(json_schema=PERSON, temperature=temperature)
        value = json.loads(answer(tokenizer, params, make.compile("json_schema", PERSON), seed))
        assert set(value) == {"name", "age"}
        assert 0 <= value["age"] <= 150
        assert len(value["name"]) <= 12
        pattern = "(ab|cé){2,4}[à-ÿ]{3}"
        text = answer(
            tokenizer, SamplingParams(regex=pattern, temperature=temperature), make.compile("regex", pattern), seed
        )
        assert re.fullmatch(pattern, text)
        rules = 'start: "<" item ("," item){0,3} ">"\nitem: /[a-c]{1,3}/'
        text = answer(
            tokenizer, SamplingParams(grammar=rules, temperature=temperature), make.compile("grammar", rules), seed
        )
        assert re.fullmatch(r"<[a-c]{1,3}(,[a-c]{1,3}){0,3}>", text)


def test_a_mask_allows_the_tokenizers_own_tokens_and_the_end_last(byte_level: Tokenizer) -> None:
    structure = compiler(byte_level).compile("json_schema", json.dumps(PERSON))
    for token in byte_level.encode('{"name": "Zoë \\"Z\\"", "age": 41}', add_bos=False):
        mask = structure.mask()
        assert mask.dtype == bool
        assert mask.shape == (byte_level.vocab_size,)
        assert mask[token]
        assert not mask[sorted(byte_level.eos_ids)].any()
        structure.push(token)
    assert structure.whole()
    assert set(np.flatnonzero(structure.mask())) <= byte_level.eos_ids | set(byte_level.encode("}\n ", add_bos=False))
    assert structure.mask()[sorted(byte_level.eos_ids)].all()


def test_white_space_comes_to_an_end(byte_level: Tokenizer) -> None:
    structure = compiler(byte_level).compile("json_schema", {"type": "object"})
    structure.push(byte_level.encode("{", add_bos=False)[0])
    space = byte_level.encode(" ", add_bos=False)[0]
    count = 0
    while structure.mask()[space]:
        structure.push(space)
        count += 1
    assert count == 20


def test_copies_and_rebuilt_states_go_on_alike(byte_level: Tokenizer) -> None:
    make = compiler(byte_level)
    params = SamplingParams(regex="(yes|no|maybe)( (yes|no)){5}", temperature=1.0)
    kind, source = params.structured or ("", "")
    first = SamplerState(params, [1], 3, ends=byte_level.eos_ids, constraint=make.compile(kind, source))
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((8, 1, byte_level.vocab_size)).astype(np.float32)
    for row in logits[:4]:
        sampled = sample(row, [first])[0]
        assert isinstance(sampled, Sampled)
        first.push(sampled)
    again = SamplerState(
        params, [1], 3, generated=first.ids[1:], ends=byte_level.eos_ids, constraint=make.compile(kind, source)
    )
    for row in logits[4:]:
        one, other = sample(row, [first])[0], sample(row, [again])[0]
        assert isinstance(one, Sampled)
        assert one == other
        first.push(one)
        again.push(one)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("kind", "source", "word"),
    [
        ("json_schema", {"properties": {"foo": "bar"}}, "object or boolean"),
        ("json_schema", {"$ref": "#"}, "no text"),
        ("json_schema", {"$ref": "#/nowhere"}, "nowhere"),
        ("json_schema", {"enum": []}, "empty"),
        ("json_schema", {"enum": [f"{n:x}" for n in range(50_000)]}, "too big"),
        ("json_schema", nested(20_000), "too deeply"),
        ("json_schema", '{"properties":{"a":' * 20_000 + "{}" + "}}" * 20_000, "recursion"),
        ("json_schema", {"type": "string", "pattern": "a{3"}, "repetition"),
        ("json_schema", {"a": object()}, "no JSON"),
        ("json_schema", "{broken", "key"),
        ("json_schema", "x" * (1 << 21), "characters"),
        ("regex", "(", "unclosed"),
        ("regex", "*", "repetition"),
        ("regex", "(?<=x)*", "look-"),
        ("regex", "(" * 20_000 + ")" * 20_000, "nested"),
        ("regex", "[^\\s\\S]", "no text"),
        ("regex", "(a{1000}){1000}", "too many"),
        ("grammar", "start: nothing", "nothing"),
        ("grammar", "start: start", "no text"),
        ("grammar", "%%%", "error"),
    ],
    ids=lambda value: str(value)[:20] if not isinstance(value, dict) else "schema",
)
def test_hostile_sources_are_refused_quickly(byte_level: Tokenizer, kind: str, source: Any, word: str) -> None:
    make = compiler(byte_level)
    start = time.monotonic()
    with pytest.raises(ArgumentError, match=word) as caught:
        make.compile(kind, source)
    assert time.monotonic() - start < 5
    assert (caught.value.where, bool(caught.value.fix)) == (kind, True)
    assert len(str(caught.value)) < 500
    assert make.compile("regex", "a+").mask().any()


def test_numbers_beyond_32_bits(byte_level: Tokenizer) -> None:
    assert compiler(byte_level).compile("json_schema", {"type": "integer", "maximum": 20_000_000_000}).mask().any()


def test_a_forbidden_token_is_an_error_of_this_answer_alone(byte_level: Tokenizer) -> None:
    make = compiler(byte_level)
    structure, other = make.compile("regex", "abc"), make.compile("regex", "abc")
    with pytest.raises(InferflowError, match="regex"):
        structure.push(byte_level.encode("x", add_bos=False)[0])
    params = SamplingParams(regex="abc")
    states = [SamplerState(params, [1], 0, ends=byte_level.eos_ids, constraint=s) for s in (structure, other)]
    got = sample(np.zeros((2, byte_level.vocab_size), np.float32), states)
    assert [isinstance(s, InferflowError) for s in got] == [True, False]


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no end token"):
        StructureCompiler([b"a", b"b"], [], [], lambda text: list(text))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match="structured") as caught:
        StructureCompiler([b"a"], [], [0], lambda text: [])
    assert "pip install" in caught.value.fix
