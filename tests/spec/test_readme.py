"""Everything that model_specs/README.md says by an example is done here, and its tables are those of the code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from inferflow.cli.spec import spec as spec_commands
from inferflow.errors import InferflowError
from inferflow.graph.build import build_graph
from inferflow.graph.dump import dump
from inferflow.graph.primitives import PRIMITIVES
from inferflow.runtime.engine import Engine
from inferflow.runtime.executor import ReferenceExecutor
from inferflow.runtime.model import load_model
from inferflow.spec.expression import FUNCTIONS, Scope, evaluate
from inferflow.spec.library import load_spec
from inferflow.spec.signature import TYPES

from .layouts import apply
from .readme_tables import README, filled
from .tiny import CONFIG, check_problems, tensors, write_checkpoint

TEXT = README.read_text("utf-8")
Stored = dict[str, np.ndarray]


@dataclass(frozen=True)
class Block:
    """One TOML block: its marker's word and options, its text, and the line it stands in."""

    kind: str
    options: dict[str, Any]
    text: str
    line: int
    after: str


def blocks() -> list[Block]:
    out = []
    for match in re.finditer(
        r"(?:<!-- (\w+) ?([^\n]*?) -->\n)?```toml\n(.*?)```\n(?:\n```text\n(.*?)```)?", TEXT, re.DOTALL
    ):
        kind, rest, text, after = match.groups()
        line = TEXT[: match.start()].count("\n") + 1
        options = {"name": rest} if kind == "file" else json.loads(rest or "{}")
        out.append(Block(kind or "", options, text, line, after or ""))
    return out


BLOCKS = blocks()
TESTS = [block for block in BLOCKS if block.kind == "test"]


def rows(marker: str) -> list[tuple[str, str]]:
    """The first two columns of the table behind a marker, without code marks."""
    body = TEXT[TEXT.index(f"<!-- {marker} -->") :].split("\n\n")[0].split("\n")[3:]
    cells = [[c.strip().strip("`").replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body]
    return [(c[0], c[1]) for c in cells]


# ------------------------------------------------------------------------------------------------ checkpoints


def rng(*shape: int) -> np.ndarray:
    return np.random.default_rng(int(np.prod(shape))).standard_normal(shape).astype(np.float32)


def parallel() -> Stored:
    out = {"wte.weight": rng(16, 8), "lm_head.weight": rng(16, 8), "ln_f.weight": rng(8), "ln_f.bias": rng(8)}
    for i in range(2):
        out |= {f"h.{i}.ln.{slot}": rng(8) for slot in ("weight", "bias")}
        out |= {f"h.{i}.attn.{p}.weight": rng(8, 8) for p in "qkvo"}
        out |= {f"h.{i}.fc_in.weight": rng(32, 8), f"h.{i}.fc_out.weight": rng(8, 32)}
    return out


def renamed() -> Stored:
    out = {("model.wte.weight" if "embed" in k else k): v for k, v in tensors().items() if "lm_head" not in k}
    out |= {f"model.layers.{i}.q_shift": rng(8) for i in range(2)}
    return {**out, "vision_tower.patch.weight": rng(3)}


def experts() -> Stored:
    out = {k: v for k, v in tensors().items() if ".mlp." not in k and not re.search(r"[qkv]_proj", k)}
    for i in range(2):
        layer = f"model.layers.{i}."
        out |= {f"{layer}router.weight": rng(3, 8), f"{layer}gates": rng(18, 8), f"{layer}qkv.weight": rng(16, 8)}
        out |= {f"{layer}experts.{e}.up.weight": rng(6, 8) for e in range(3)}
        out |= {f"{layer}experts.{e}.down.weight": rng(8, 6) for e in range(3)}
    return out


def prefixed() -> Stored:
    return {f"language_model.{k}": v for k, v in tensors().items()}


MAKERS: dict[Any, Callable[[], Stored]] = {
    True: tensors,
    "parallel": parallel,
    "renamed": renamed,
    "experts": experts,
    "prefixed": prefixed,
}


# ------------------------------------------------------------------------------------------------ the tests


def test_every_block_is_tested() -> None:
    assert len(TESTS) >= 17
    assert {block.kind for block in BLOCKS} == {"test", "file", "wrong"}
    assert {key for block in TESTS for key in block.options} <= {"config", "load", "shows", "hides", "whole"}
    assert {block.options["load"] for block in TESTS if "load" in block.options} == set(MAKERS)


@pytest.mark.parametrize("block", TESTS, ids=lambda block: f"line-{block.line}")
def test_example(block: Block, tmp_path: Path) -> None:
    """It builds; its graph shows what the text says; where it loads, a forward pass gives finite logits."""
    for file in BLOCKS:
        if file.kind == "file":
            (tmp_path / f"{file.options['name']}.toml").write_text(file.text, "utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(block.text, "utf-8")
    assert ("extends" in block.text) is not bool(block.options.get("whole"))
    config = {**CONFIG, **block.options.get("config", {})}
    stored = MAKERS[block.options.get("load", True)]()
    graph = build_graph(load_spec(path), config, stored).graph
    for layer, words in block.options.get("shows", {}).items():
        assert words in dump(graph, int(layer))
    for layer, words in block.options.get("hides", {}).items():
        assert words not in dump(graph, int(layer))
    if "load" in block.options:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        save_file(stored, folder / "model.safetensors")
        assert [str(p) for p in check_problems(path, folder)] == []
        model = load_model(folder, path)
        logits = Engine(model.graph, ReferenceExecutor(model.graph, model.weights), max_len=8).forward([1, 2, 3])[
            "logits"
        ]
        assert logits.shape == (3, 16)
        assert np.isfinite(logits).all()
        assert np.ptp(logits) > 0.01


class Example(Scope):
    """The names that the table of expressions is about."""

    values: dict[str, Any]

    def lookup(self, name: str) -> Any:
        return self.values[name]


def test_expressions() -> None:
    scope = Example()
    config = re.search(r"`cfg = (\{.*?\}\})`", TEXT, re.DOTALL)
    assert config is not None
    scope.values = {"cfg": json.loads(config[1]), "i": 1}
    table = rows("expressions")
    assert len(table) > 30
    for text, expected in table:
        got = evaluate(text, scope)
        assert repr(got) == expected, text
    used = set(re.findall(r"(\w+)\(", " ".join(text for text, _ in table)))
    assert used == {*FUNCTIONS, "has"}


def test_types() -> None:
    assert [name for name, _ in rows("types")] == [*TYPES, "one | two"]


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], list[np.ndarray]]]] = {
    "`[in, out]`": ((8, 6), lambda w: [w.T]),
    "q, k, v one after another": ((16, 8), lambda w: [w[:8], w[8:12], w[12:]]),
    "q, k, v of each head": ((24, 8), lambda w: [w.reshape(4, 3, 2, 8)[:, n].reshape(8, 8) for n in range(3)]),
    "q … q, k, v of each group": (
        (16, 8),
        lambda w: [w.reshape(2, 4, 2, 8)[:, part].reshape(-1, 8) for part in (slice(0, 2), slice(2, 3), slice(3, 4))],
    ),
    "gate and up in halves": ((12, 8), lambda w: [w[:6], w[6:]]),
    "gate and up rows alternating": ((12, 8), lambda w: [w[::2], w[1::2]]),
    "pairs instead of halves": ((16, 8), lambda w: [w.reshape(4, 2, 2, 8).swapaxes(1, 2).reshape(16, 8)]),
    "experts one below the other": ((18, 8), lambda w: [w.reshape(3, 6, 8)]),
    "a vector as one row, `[1, e]`": ((1, 8), lambda w: [w[0]]),
    "weights around zero": ((8,), lambda w: [w + 1]),
    "logarithms": ((8,), lambda w: [-np.exp(w)]),
    "rows to be normalised": ((16, 8), lambda w: [w / np.linalg.norm(w, axis=1, keepdims=True)]),
}


def test_layouts() -> None:
    table = dict(rows("layouts"))
    assert [name.strip("`") for name in table] == [name.strip("`") for name in LAYOUTS]
    for entry, (shape, formula) in zip(table.values(), LAYOUTS.values(), strict=True):
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 10 + 1
        for got, want in zip(apply(entry, array), formula(array), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "wrong"], ids=lambda block: f"line-{block.line}")
def test_errors_are_as_shown(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(block.text, "utf-8")
    write_checkpoint(tmp_path / "model")
    with pytest.raises(InferflowError) as caught:
        load_model("model", "mine.toml")
    assert str(caught.value) == block.after.strip()


def test_the_tables_are_those_of_the_code() -> None:
    assert filled(TEXT) == TEXT, "run: python -m tests.spec.readme_tables"


def test_commands_and_names_exist() -> None:
    commands = set(re.findall(r"inferflow spec (\w+)", TEXT))
    assert commands == {"check", "list", "new", "show", "verify"} & set(spec_commands.commands)
    kinds = re.search(r"Rotary `kind`s: (.*?)\. Their", TEXT, re.DOTALL)
    assert kinds is not None
    assert re.findall(r"`(\w+)`(?= \(|;|,|$)", kinds[1].replace("`factor`", "").replace("`llama3`", "")) == [
        *PRIMITIVES["rope"].signature["kind"].choices
    ]
