"""The options that say how a model runs: they reach the engine, wrong ones are refused, what falls back is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from inferflow.cli.main import main
from inferflow.cli.options import engine_options, fallback_lines, open_llm
from inferflow.kernels import native
from inferflow.runtime.executor import ReferenceExecutor
from inferflow.weights.choice import Fallback
from tests.cli.words import words_model, words_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words_model(tmp_path_factory.mktemp("options") / "model")


def options(*args: str) -> dict[str, Any]:
    """What a command with `engine_options` is given for `args`."""
    seen: dict[str, Any] = {"spec_name": None}

    @click.command()
    @engine_options
    def command(**values: Any) -> None:
        seen.update(values)

    command.main(list(args), standalone_mode=False)
    return seen


def test_the_reference_can_be_chosen(model: Path) -> None:
    with open_llm(model, options("--engine", "reference"), max_model_len=7) as llm:
        assert isinstance(llm.engine.executor, ReferenceExecutor)
        assert llm.max_model_len == 7


@pytest.mark.skipif(not native.available(), reason="the native library was not built")
def test_the_native_engine_gets_its_options(model: Path) -> None:
    isa = list(native.isas())[-1]
    with open_llm(model, options("--threads", "1", "--kv", "int8", "--isa", isa)) as llm:
        executor: Any = llm.engine.executor
        assert (executor.isa, executor.kv, executor.pool.threads) == (isa, "int8", 1)


def test_formats_reach_the_model_and_what_falls_back_is_told_once(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_llm(model, options("--engine", "reference", "--quant", "q8,ffn_*=bf16")) as llm:
        assert llm.model.weights.formats["layers.1.ffn_up.weight"] == "bf16"
        assert llm.model.weights.formats["layers.1.attn_q.weight"] == "keep"
    told = capsys.readouterr().err
    assert told.count("attn_q") == 1
    assert (
        "warning: 4 matrices are keep, not q8: it has only 1024 elements (the first is layers.0.attn_q.weight)" in told
    )


def test_equal_fallbacks_are_one_line() -> None:
    fallbacks = [Fallback(f"layers.{n}.v", "q4", "keep", "it is small") for n in range(3)]
    fallbacks.append(Fallback("output", "q4", "q8", "it is odd"))
    assert list(fallback_lines(fallbacks)) == [
        "3 matrices are keep, not q4: it is small (the first is layers.0.v)",
        "output is q8, not q4: it is odd",
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--engine", "turbo"], "'turbo' is not one of"),
        (["--threads", "0"], "0 is not in the range"),
        (["--kv", "int4"], "'int4' is not one of"),
        (["--quant", "q5"], "'q5' is no format"),
        (["--quant", "nowhere.toml"], "cannot be read"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "w3 w4"], ["bench"], ["perplexity", "text.txt"]])
def test_refusals(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: list[str], args: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(words_text(20))
    with pytest.raises(SystemExit) as done:
        main([*command, "-m", str(model), *args])
    said = capsys.readouterr().err
    assert done.value.code == 2
    assert words in said
    assert "Traceback" not in said


def test_a_quantised_model_against_itself_as_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(words_text(40))
    common = ["perplexity", "text.txt", "-m", str(model), "--ctx", "20", "--json", "--engine", "reference"]

    def run(*args: str) -> Any:
        with pytest.raises(SystemExit):
            main([*common, *args])
        return json.loads(capsys.readouterr().out)

    assert run("--against", str(model))["kld"] == 0
    rounded = run("--against", str(model), "--quant", "bf16")
    assert 0 < rounded["kld"] < 1e-3
    assert rounded["base_perplexity"] == run()["perplexity"]
