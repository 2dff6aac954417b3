"""``inferflow perplexity``: its figures against a plain computation, models against one another, saved logits, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inferflow.cli.main import main
from inferflow.llm import LLM
from tests.cli.words import BOS, words_model, words_text
from tests.tiny import write

CTX = "24"
Run = Callable[..., str]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model, other, plain (no BOS), and text.txt: three windows and a rest."""
    folder = tmp_path_factory.mktemp("perplexity")
    words_model(folder / "model")
    words_model(folder / "other", seed=1)
    words_model(folder / "plain", bos=False)
    (folder / "text.txt").write_text(words_text(3 * int(CTX) + 9))
    return folder


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(here)

    def call(*args: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as done:
            main(["perplexity", "text.txt", "--ctx", CTX, *args])
        seen = capsys.readouterr()
        assert (done.value.code or 0) == status, seen.err
        assert "Traceback" not in seen.err
        return seen.out if status == 0 else seen.err

    return call


def plain_perplexity(folder: Path, text: str, bos: bool) -> float:
    """exp of the mean negative log-likelihood of each window's second half, token by token."""
    ctx, total = int(CTX), []
    with LLM(folder) as llm:
        ids = llm.encode(text)
        for start in range(0, len(ids) - ctx + 1, ctx):
            window = ids[start : start + ctx]
            if bos:
                window[0] = BOS
            logits = llm.logits(window).astype(np.float64)
            for n in range(ctx // 2, ctx - 1):
                p = np.exp(logits[n] - logits[n].max())
                total.append(-math.log(p[window[n + 1]] / p.sum()))
    return math.exp(sum(total) / len(total))


@pytest.mark.parametrize(("name", "bos"), [("model", True), ("plain", False)])
def test_perplexity_is_the_plain_computations(run: Run, here: Path, name: str, bos: bool) -> None:
    report = json.loads(run("-m", name, "--json"))
    want = plain_perplexity(here / name, (here / "text.txt").read_text(), bos)
    assert report["perplexity"] == pytest.approx(want, rel=1e-6)
    assert (report["ctx"], report["windows"], report["scored"]) == (24, 3, 33)
    assert report["perplexity_error"] > 0
    assert "kld" not in report
    assert json.loads(run("-m", name, "--json", "--windows", "2"))["windows"] == 2


def test_a_model_against_itself_and_another(run: Run) -> None:
    same = json.loads(run("-m", "model", "--against", "model", "--json"))
    assert (same["kld"], same["kld_max"], same["same_top"]) == (0, 0, 1)
    assert same["perplexity"] == same["base_perplexity"]
    other = json.loads(run("-m", "model", "--against", "other", "--json"))
    assert other["kld"] > 0.1
    assert other["same_top"] < 0.9
    assert other["base_perplexity"] == json.loads(run("-m", "other", "--json"))["perplexity"]
    people = run("-m", "model", "--against", "other")
    assert [line[:15].strip() for line in people.splitlines()] == [
        "perplexity", "base perplexity", "KL divergence", "same top token",
    ]  # fmt: skip
    assert f"{other['perplexity']:.4f} ± {other['perplexity_error']:.4f}" in people


def test_saved_logits_give_what_the_model_gives(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "other.logits")
    run("-m", "other", "--save-logits", file)
    times = {"seconds", "tokens_per_s"}
    direct, saved = (
        json.loads(run("-m", "model", *base, "--json")) for base in (("--against", "other"), ("--against-logits", file))
    )
    assert {k: v for k, v in direct.items() if k not in times} == {k: v for k, v in saved.items() if k not in times}
    assert json.loads(run("-m", "other", "--against-logits", file, "--windows", "2", "--json"))["kld"] == 0
    assert "the file exists" in run("-m", "model", "--save-logits", file, status=2)
    assert "give --ctx 24" in run("-m", "model", "--against-logits", file, "--ctx", "16", status=2)


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["-m", "model", "--ctx", "90"], 2, "fewer than one window"),
        (["-m", "model", "--ctx", "3"], 2, "3 is not in the range"),
        (["-m", "model", "--against", "plain"], 2, "compare models of one tokenizer"),
        (["-m", "model", "--against", "other", "--against-logits", "x"], 2, "given twice"),
        (["-m", "model", "--against-logits", "nowhere"], 1, "no such file"),
        (["-m", "model", "--against-logits", "text.txt"], 1, "no safetensors file"),
        (["-m", "model", "--against", "nowhere"], 1, "there is no such model"),
        (["-m", "model", "--save-logits", "no/such/folder"], 1, "No such file"),
    ],
)
def test_refusals(run: Run, args: list[str], status: int, words: str) -> None:
    said = run(*args, status=status)
    assert words in said
    assert len(said.strip().splitlines()) == 1 or "Usage" in said


def test_a_missing_text_and_a_missing_tokenizer(run: Run, here: Path, tmp_path: Path) -> None:
    assert "no tokenizer" in run("-m", str(write(tmp_path / "mute")), status=1)
    with pytest.raises(SystemExit) as done:
        main(["perplexity", "nowhere.txt", "-m", "model"])
    assert done.value.code == 2
