"""Random damage to good specs and configs: whatever comes of it is a model or an InferflowError, and soon."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from inferflow.errors import InferflowError
from inferflow.graph.build import build_graph
from inferflow.spec.library import find_spec, load_spec
from inferflow.weights.check import check_spec
from inferflow.weights.loader import plan_weights
from inferflow.weights.open import open_source

from .readme_tables import FOLDER, README
from .tiny import CONFIG, write_checkpoint

SPECS = [text for text in re.findall(r"```toml\n(.*?)```", README.read_text("utf-8"), re.DOTALL) if "base" not in text]
SPECS += [
    (FOLDER / f"{name}.toml").read_text("utf-8") for name in ("decoder", "gpt2", "gemma3", "deepseek_v2", "falcon")
]
WORDS = [
    "x",
    "i",
    "cfg",
    "None",
    "0",
    "-1",
    "true",
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    '"',
    "'",
    "=",
    ",",
    ".",
    "**",
    "//",
    "% 0",
    "\n",
    "é",
    "\\",
]
WORDS += [
    "cfg.hidden_size",
    "layers",
    "[let]",
    "1e400",
    "nan",
    "inf",
    "[[a]]",
    "\0",
    "attn",
    "norm(x)",
    "split(x, 3)",
    "heads(x)",
    "tokens",
]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    3,
    2.5,
    1e308,
    2**62,
    "",
    "silu",
    "full",
    [],
    [1],
    ["a", "b"],
    {},
    {"rope_type": "yarn"},
]
VALUES += [{"rope_type": "llama3", "factor": 0}, {"rope_type": 3}, [[[]]], "\ud7ff", {"a": {"b": {}}}]
KEYS = [
    *CONFIG,
    "head_dim",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "layer_types",
    "rms_norm_eps",
    "hidden_act",
]


def damaged(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:at] + text[at + rng.randint(1, 6) :]
        elif kind == 1:
            text = text[:at] + rng.choice(WORDS) + text[at:]
        elif kind == 2:
            lines = text.split("\n")
            lines[rng.randrange(len(lines))] = rng.choice(lines)
            text = "\n".join(lines)
        elif kind == 3:
            found = list(re.finditer(r'"[^"\n]*"|\b\w+\b', text))
            one, two = rng.choice(found), rng.choice(found)
            text = text[: one.start()] + two[0] + text[one.end() :]
        else:
            lines = text.split("\n")
            rng.shuffle(lines)
            text = "\n".join(lines) if rng.random() < 0.1 else text
    return text


def attempt(spec: Path, config: dict[str, Any], model: Path) -> None:
    """What loading and what checking do, without reading config.json again."""
    source = open_source(model)
    try:
        loaded = load_spec(spec)
        assert all(isinstance(problem, InferflowError) for problem in check_spec(loaded, config, source))
        plan_weights(build_graph(loaded, config, source.tensors).graph, loaded, config, source)
    except InferflowError as error:
        message = str(error)
        assert len(message) < 4000
        assert "object at 0x" not in message
    finally:
        source.close()


@pytest.mark.parametrize("seed", range(8))
def test_damaged_specs(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    model = write_checkpoint(tmp_path / "model")
    path = tmp_path / "fuzz.toml"
    for _ in range(15):
        path.write_text(damaged(rng.choice(SPECS), rng), "utf-8")
        attempt(path, CONFIG, model)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_configs(seed: int, tmp_path: Path) -> None:
    rng = random.Random(100 + seed)
    model = write_checkpoint(tmp_path / "model")
    path = tmp_path / "fuzz.toml"
    for _ in range(15):
        path.write_text(rng.choice(SPECS), "utf-8")
        config = {**CONFIG, **{rng.choice(KEYS): rng.choice(VALUES) for _ in range(rng.randint(1, 3))}}
        attempt(path, json.loads(json.dumps(config)), model)
        try:
            find_spec({**config, "model_type": rng.choice(["llama", "gemma3", "falcon", *map(str, VALUES)])})
        except InferflowError:
            continue
