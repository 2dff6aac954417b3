"""The Python surface, on the demo model and on a tiny one without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inferflow import LLM, SamplingParams
from inferflow.errors import ArgumentError, CheckpointError, SpecError, TextError
from tests.tiny import CONFIG, tensors, write


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, max_model_len=256) as made:
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write(tmp_path_factory.mktemp("tiny"))) as made:
        yield made


def test_a_fact(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "Name the capital of France."}])
    assert (answer.text, answer.finish) == ("The capital of France is Paris.", "stop")
    raw = llm.generate("The capital of France is", max_tokens=1)
    assert (raw.text, raw.finish, len(raw.ids)) == (" Paris", "length", 1)
    assert llm.decode(raw.ids) == " Paris"


def test_a_stream_is_the_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12)
    whole = llm.generate("Once upon a time", params)
    chunks = list(llm.stream("Once upon a time", params))
    assert "".join(c.text for c in chunks) == whole.text
    assert tuple(c.token for c in chunks) == whole.ids
    assert [c.finish for c in chunks] == [None] * 11 + ["length"]


def test_several_prompts_answer_as_one_by_one(llm: LLM) -> None:
    prompts = ["One, two,", "def add(a, b):", "The sky is"]
    together = llm.generate(prompts, max_tokens=6)
    assert together == [llm.generate(p, max_tokens=6) for p in prompts]


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    free = llm.generate("One, two, three,", max_tokens=12).text
    stop = free[5:8]
    answer = llm.generate("One, two, three,", max_tokens=12, stop=[stop])
    assert (answer.text, answer.finish, answer.stop_string) == (free[: free.index(stop)], "stop", stop)
    chunks = list(llm.stream("One, two, three,", max_tokens=12, stop=stop))
    assert "".join(c.text for c in chunks) == answer.text
    assert chunks[-1].stop_string == stop


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("Hello", max_tokens=50)
    next(stream)
    stream.close()
    assert len(llm._engine.pool.free) == llm._engine.pool.blocks
    assert llm.generate("The capital of France is", max_tokens=1).text == " Paris"


def test_seeds_repeat(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8)
    assert llm.generate("A", params) == llm.generate("A", params)
    assert llm.generate("A", params) != llm.generate("A", SamplingParams(temperature=1.0, seed=6, max_tokens=8))


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_logits_of_some_positions_are_those_of_all(tiny: LLM, engine: str) -> None:
    ids = [3, 9, 27, 14, 5]
    with LLM(tiny.path, engine=engine) as llm:
        logits = llm.logits(ids)
        for positions in (slice(2, -1), slice(-1, None), slice(0, None, 2), slice(5, 9)):
            for chunk in (None, 1, 2):
                got = llm.logits(ids, chunk=chunk, positions=positions)
                np.testing.assert_array_equal(got, logits[positions])
        for wrong in (3, slice(None, None, -1), None):
            with pytest.raises(ArgumentError, match="positions"):
                llm.logits(ids, positions=wrong)  # type: ignore[arg-type]


def test_logits_and_captures(tiny: LLM) -> None:
    ids = [3, 9, 27, 14]
    logits = tiny.logits(ids)
    assert logits.shape == (4, CONFIG["vocab_size"])
    captured = tiny.forward(ids, capture=["layers.1.attn_norm", "layers.0.attn.q", "layers.0", "logits"])
    assert captured["layers.1.attn_norm"].shape == (4, 32)
    assert captured["layers.0.attn.q"].shape == (4, 4, 8)
    np.testing.assert_array_equal(captured["logits"], logits)
    x = captured["layers.0"]
    w = tiny.model.weights.array("layers.1.attn_norm.weight")
    np.testing.assert_allclose(
        captured["layers.1.attn_norm"], x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w, atol=1e-6
    )
    for name in tiny.tensor_names:
        assert np.isfinite(tiny.forward(ids, [name])[name]).all(), name


def test_ids_in_ids_out_without_a_tokenizer(tiny: LLM) -> None:
    answer = tiny.generate([[3, 4, 5]], max_tokens=4, ignore_eos=True)[0]
    assert len(answer.ids) == 4
    assert answer.text == ""
    with pytest.raises(TextError, match="no tokenizer"):
        tiny.generate("text")


def test_bad_arguments(tiny: LLM, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no tensor"):
        tiny.forward([3], ["layers.9"])
    with pytest.raises(ArgumentError, match="temprature") as caught:
        tiny.generate([[3]], temprature=1)
    assert "temperature" in caught.value.fix
    with pytest.raises(ArgumentError, match="not both"):
        tiny.generate([[3]], SamplingParams(), top_k=1)
    with pytest.raises(ArgumentError, match="ints"):
        tiny.generate([["a"]])
    with pytest.raises(ArgumentError, match="no engine"):
        LLM(tiny.path, engine="magic")
    with pytest.raises(CheckpointError):
        LLM(tmp_path)


def test_config_can_be_overridden(tiny: LLM) -> None:
    other = LLM(tiny.path, config={"rope_theta": 100.0})
    ids = [5, 6, 7, 8]
    assert np.abs(other.logits(ids) - tiny.logits(ids)).max() > 1e-3
    with pytest.raises(SpecError):
        LLM(tiny.path, config={"hidden_act": "nonsense"})


def test_max_model_len(tiny: LLM) -> None:
    assert tiny.max_model_len == CONFIG["max_position_embeddings"]
    short = LLM(tiny.path, max_model_len=8)
    assert len(short.generate([[3, 4]], ignore_eos=True)[0].ids) == 6
    with pytest.raises(ArgumentError, match="do not fit in 8"):
        short.generate([[3] * 8])
    with pytest.raises(ArgumentError, match="do not fit in 8"):
        short.logits([3] * 9)


def test_a_table_of_positions_bounds_the_length(tmp_path: Path) -> None:
    spec = tmp_path / "learned.toml"
    spec.write_text(
        'extends = "llama"\n\n[model]\nflow = ["x = token_embd(tokens) + position_embd(positions)", "x = layers(x)", '
        '"logits = output(output_norm(x))"]\n\n[position_embd]\nblock = "embed"\nrows = 24\ndim = "d"\noffset = 2\n\n'
        '[tensors]\nposition_embd = "wpe"\n'
    )
    weights = tensors() | {"wpe.weight": np.ones((24, 32), np.float32)}
    folder = write(tmp_path / "model", weights=weights)
    with LLM(folder, spec) as llm:
        assert llm.max_model_len == 22
        assert llm.logits([3] * 22).shape[0] == 22
        with pytest.raises(ArgumentError, match="do not fit in 22"):
            llm.logits([3] * 23)
    with pytest.raises(ArgumentError, match="table of 22 positions"):
        LLM(folder, spec, max_model_len=23)


def test_a_scaling_that_cannot_be_computed_is_refused_at_once(tiny: LLM) -> None:
    with pytest.raises(SpecError, match="factor"):
        LLM(tiny.path, config={"rope_scaling": {"rope_type": "linear", "factor": -2.0}})
