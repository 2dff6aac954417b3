"""Random damage to configs and shipped specs, up to the logits: whatever comes of it is an answer or one InferflowError.

After every case that is refused or answered, nothing is left behind; a fixed seed makes each run the same.
"""

from __future__ import annotations

import json
import random
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferflow import LLM
from inferflow.errors import InferflowError, SpecError
from inferflow.graph.build import build_graph
from inferflow.spec.library import for_gguf, list_specs, load_spec
from tests.tiny import CONFIG, write

SECONDS = 4.0  # of each test; what did not fit is not tried
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7.0, 0.5, -0.0, 1e-45, 1e38, 1e308, float("inf"), 10**9, 2**31, 2**62, 2**63, 10**30,
    10**400, "", "x", "silu", "\ud7ff", "yarn", [], [1], [[1, 2], [3]], [None], ["a"] * 5000, {}, {"a": 1},
    {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16},
    {"rope_type": "linear", "factor": 0}, {"type": "linear", "factor": -1}, {"rope_type": ["linear"]}, {"rope_theta": "x"},
]  # fmt: skip
KEYS = [
    *CONFIG, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "hidden_act",
    "generation", "partial_rotary_factor", "original_max_position_embeddings", "torch_dtype", "text_config", "n_positions",
]  # fmt: skip


def mutated(value: Any, rng: random.Random) -> Any:
    """`value`, or something put into or taken out of it."""
    if isinstance(value, dict) and value and rng.random() < 0.7:
        key = rng.choice([*value])
        changed = {**value, key: mutated(value[key], rng)}
        if rng.random() < 0.2:
            del changed[key]
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(value[at], rng), *value[at + 1 :]]
    return rng.choice(VALUES)


def outcome(folder: Path, **options: Any) -> str:
    """``answer`` or ``refusal``; anything else escapes."""
    try:
        with LLM(folder, **options) as llm:
            answer(llm)
    except InferflowError as error:
        said, where = str(error), error.where
    else:
        return "answer"
    assert 10 < len(said) < 4100
    assert where
    return "refusal"


def answer(llm: LLM) -> None:
    """Logits of the right shape; where they are finite, tokens that go with them; and all blocks are free again."""
    logits = llm.logits([3, 4, 5])
    assert logits.shape == (3, llm.model.graph.vocab)
    if np.isfinite(logits).all():
        ids = llm.generate([[3, 4]], max_tokens=2, ignore_eos=True)[0].ids
        assert ids[0] == llm.logits([3, 4])[-1].argmax()
    assert len(llm._engine.pool.free) == llm._engine.pool.blocks


def test_damaged_configs(tmp_path: Path) -> None:
    folder, rng, seen = write(tmp_path), random.Random(5), {"answer": 0, "refusal": 0}
    end = time.process_time() + SECONDS
    for n in range(3000):
        config: dict[str, Any] = dict(CONFIG)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            key = rng.choice(KEYS)
            config[key] = mutated(config.get(key), rng)
        seen[outcome(folder, config=config)] += 1
        if time.process_time() > end and n > 100:
            break
    assert min(seen.values()) > 20, seen


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_every_number_of_every_rope_scaling(tmp_path: Path, key: str) -> None:
    folder = write(tmp_path)
    kinds = [value for value in VALUES if isinstance(value, dict) and isinstance(value.get("rope_type"), str)]
    extremes = [None, 0, -1, 1, 1e-45, 1e38, 2**62, 10**400, "x", [], [0.0] * 4, [1e38] * 4, [float("inf")] * 4, True]
    cases = [{**kind, inner: value} for kind in kinds for inner in kind for value in extremes]
    for case in random.Random(key).sample(cases, 70):
        outcome(folder, config={key: case})


def test_a_config_file_of_anything(tmp_path: Path) -> None:
    """As the file has it: JSON's own notation for what Python's values cannot say."""
    folder = write(tmp_path)
    numbers = ["1e400", "-1e400", "Infinity", "-Infinity", "1E-400", "9" * 4000, "9" * 5000]
    keys = [
        "hidden_size",
        "rope_theta",
        "hidden_act",
        "rope_scaling",
        "eos_token_id",
        "max_position_embeddings",
        "dtype",
    ]
    for text in [*numbers, '"\\ud800"', '"\\u0000"', "[" * 60 + "]" * 60]:
        for key in keys:
            rest = json.dumps({k: v for k, v in CONFIG.items() if k != key})
            (folder / "config.json").write_text(f'{rest[:-1]}, "{key}": {text}}}')
            outcome(folder)


def test_damaged_specs(tmp_path: Path) -> None:
    """Words, lines and numbers of the shipped specs exchanged, doubled and lost: an answer or a refusal."""
    folder, rng = write(tmp_path / "model"), random.Random(11)
    texts = {name: resources.files("model_specs").joinpath(f"{name}.toml").read_text("utf-8") for name in list_specs()}
    words = [word for text in texts.values() for word in text.split()]
    seen = {"answer": 0, "refusal": 0}
    end = time.process_time() + SECONDS
    file = tmp_path / "damaged.toml"
    for n in range(3000):
        text = texts[rng.choice(["decoder", "decoder", "llama", *texts])]
        for _ in range(rng.choice([1, 1, 2, 4])):
            lines = text.split("\n")
            at = rng.randrange(len(lines))
            pieces = lines[at].split(" ")
            where = rng.randrange(len(pieces))
            pieces[where] = rng.choice(
                ["", rng.choice(words), pieces[where] * 2, "-1", "10**18", "None", "x", "nan", '"']
            )
            lines[at] = " ".join(pieces)
            if rng.random() < 0.2:
                lines[at : at + 1] = rng.choice([[], [lines[at]] * 2, [rng.choice(lines)]])
            text = "\n".join(lines)
        file.write_text(text, "utf-8")
        seen[outcome(folder, spec=file)] += 1
        if time.process_time() > end and n > 100:
            break
    assert min(seen.values()) > 5, seen


@pytest.mark.parametrize("name", list_specs())
def test_every_spec_meets_a_config_that_says_nothing(name: str) -> None:
    """Without a single key, and with keys of the wrong kind: refused in a sentence, both ways of naming tensors."""
    spec = load_spec(name)
    for config in ({}, dict.fromkeys(KEYS, "x"), {key: [] for key in KEYS}, dict.fromkeys(KEYS, -1)):
        for made in (spec, for_gguf(spec)):
            with pytest.raises(SpecError) as caught:
                build_graph(made, config)
            assert caught.value.where
