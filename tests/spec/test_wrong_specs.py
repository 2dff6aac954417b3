"""Every wrong spec gives one typed error that names its place, its reason and its fix; never a traceback, never two."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferflow.errors import InferflowError, SpecError
from inferflow.runtime.model import load_model
from inferflow.spec.library import load_spec

from .tiny import CONFIG, Wrong, check_problems, load_problem, write_checkpoint
from .wrong_models import MODELS
from .wrong_tensors import TENSORS
from .wrong_text import TEXT

CASES = TEXT + MODELS + TENSORS


def place_of_the_mark(text: str) -> tuple[int, int]:
    before = text[: text.index("⟦")]
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def test_the_table_is_large_and_its_names_are_one_each() -> None:
    assert len(CASES) > 150
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_checkpoint_is_right_without_a_wrong_spec(tmp_path: Path) -> None:
    """Else every case below would fail for another reason than its own."""
    spec = tmp_path / "right.toml"
    spec.write_text('extends = "decoder"\n', "utf-8")
    model = write_checkpoint(tmp_path / "model")
    assert load_problem(spec, model) is None
    assert check_problems(spec, model) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_spec(case: Wrong, tmp_path: Path) -> None:
    text = case.extends + case.text
    assert text.count("⟦") == 1
    line, column = place_of_the_mark(text)
    spec = tmp_path / "wrong.toml"
    spec.write_text(text.replace("⟦", ""), "utf-8")
    model = write_checkpoint(tmp_path / "model", {**CONFIG, **case.config}, **case.stored)
    problems = check_problems(spec, model)
    assert len(problems) == 1, [str(problem) for problem in problems]
    loading = load_problem(spec, model)
    if case.lint:
        assert loading is None
        said = problems
    else:
        assert loading is not None, "it was loaded as if nothing were wrong"
        said = [*problems, loading]
    for error in said:
        message = str(error)
        assert f"{spec}:{line}:{column}: " in message
        assert case.says in message
        assert error.fix
        assert case.fix in message
        assert "object at 0x" not in message
        assert len(message) < 1200


# ------------------------------------------------------------------------------------------------ what is no text


def test_not_utf_8(tmp_path: Path) -> None:
    spec = tmp_path / "latin.toml"
    spec.write_bytes(b'extends = "decoder"\n# caf' + b"\xe9\n")
    with pytest.raises(SpecError, match="not UTF-8") as caught:
        load_spec(spec)
    assert caught.value.where == f"{spec}:2:6"
    assert caught.value.fix == "save it as UTF-8"


def test_a_folder_a_hole_and_a_giant(tmp_path: Path) -> None:
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    giant = tmp_path / "giant.toml"
    giant.write_bytes(b"#" * (5 << 20))
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2 << 20))
    for path, says in (
        (folder, "it is a folder"),
        (tmp_path / "none.toml", "there is no such file"),
        (giant, "too large"),
        (large, "characters"),
    ):
        with pytest.raises(SpecError, match=says) as caught:
            load_spec(path)
        assert caught.value.where == str(path)
        assert caught.value.fix


@pytest.mark.parametrize("name", ["decodr", "", "../llama", "blocks", "a b", "LLAMA!", "x" * 5000])
def test_names_of_no_spec(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(name)
    assert caught.value.reason.startswith("there is no spec called")
    assert caught.value.fix


def test_bombs_are_refused_quickly(tmp_path: Path) -> None:
    """What would take exponential time or memory without a bound: the test ends, which is the point."""
    model = write_checkpoint(tmp_path / "model")
    doubled = "".join(f'a{n} = "[a{n - 1}, a{n - 1}]"\n' for n in range(1, 60))
    chain = "".join(f'a{n} = "a{n - 1} + 1"\n' for n in range(1, 3000))
    compared = "(" * 30 + "1" + " < 2)" * 30
    calls = '", "'.join(["y = x", *["y = again(y)"] * 150])
    blocks = "".join(
        f'[block.b{n}.parts]\nagain = {{ block = "b{n + 1}" }}\n[block.b{n}]\nflow = ["{calls}"]\n' for n in range(9)
    )
    last = '[block.b9]\nflow = ["y = x"]\n'
    for text in (
        f'[let]\na0 = 1\n{doubled}d = "len(a59)"\n',
        f'[let]\na0 = 1\n{chain}d = "a2999"\n',
        f'[layers.ffn]\nblock = "b0"\n{blocks}{last}',
    ):
        spec = tmp_path / "bomb.toml"
        spec.write_text('extends = "decoder"\n' + text, "utf-8")
        with pytest.raises(InferflowError) as caught:
            load_model(model, spec)
        assert f"{spec}" in str(caught.value) or "blocks.toml" in str(caught.value)
        assert len(str(caught.value)) < 1500
    spec.write_text(f'extends = "decoder"\n[let]\nodd = "{compared}"\nhd = "2 if odd else 2"\n', "utf-8")
    assert load_problem(spec, model) is None  # 30 comparisons, one after another


def test_a_message_never_shows_a_whole_value(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", {**CONFIG, "mine": [[4] * 100] * 1000})
    spec = tmp_path / "spec.toml"
    spec.write_text('extends = "decoder"\n[let]\nH = "cfg.mine"\n', "utf-8")
    problem = load_problem(spec, model)
    assert problem is not None
    assert len(str(problem)) < 400
