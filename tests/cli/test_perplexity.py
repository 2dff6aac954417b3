"""``inferflow perplexity``: its figures against a plain computation, models against one another, saved logits, refusals."""

from __future__ import annotations

import json
import math
import sys
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
        (
            ["-m", "model", "--ctx", "90"],
            2,
            "fewer than one window of 90 (give a longer text, or lower --ctx to",
        ),
        (
            ["-m", "model", "--ctx", "97"],
            2,
            "--ctx: a sequence would have 97 tokens, and model was made for 96 (lower it)",
        ),
        (["-m", "model", "--ctx", str(10**12)], 2, "--ctx: "),
        (["-m", "model", "--isa", "zzz", "--engine", "reference"], 2, "--isa: there is no instruction set 'zzz'"),
        (["-m", "model", "--quant", "q3.5,"], 2, "has an empty part"),
        (["-m", "model", "--save-logits", "."], 2, "the file exists"),
        (["-m", "model", "--ctx", "3"], 2, "3 is not in the range"),
        (["-m", "model", "--against", "plain"], 2, "compare models of one tokenizer"),
        (["-m", "model", "--against", "other", "--against-logits", "x"], 2, "given twice"),
        (["-m", "model", "--against-logits", "nowhere"], 1, "no such file"),
        (["-m", "model", "--against-logits", "text.txt"], 1, "no safetensors file"),
        (["-m", "model", "--against", "nowhere"], 1, "there is no such model"),
        (
            ["-m", "model", "--save-logits", "no/such\x1b]0;/x"],
            1,
            "error: no/such\\x1b]0;/x: No such file or directory (make",
        ),
    ],
)
def test_refusals(run: Run, args: list[str], status: int, words: str) -> None:
    said = run(*args, status=status)
    assert words in said
    assert len(said.strip().splitlines()) == 1 or "Usage" in said


def test_no_memory_names_the_option(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr("inferflow.runtime.kv_cache.np.zeros", full)
    said = run("-m", "model", "--engine", "reference", status=1)
    assert said.startswith("error: --ctx: there is no memory")
    assert "(lower --ctx)" in said


@pytest.mark.skipif(sys.platform == "win32", reason="a limit of file sizes")
def test_a_disk_that_fills_up_while_logits_are_saved(run: Run, tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        said = run("-m", "model", "--save-logits", str(tmp_path / "x"), status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said.startswith(f"error: {tmp_path / 'x'}: File too large (raise the limit")
    assert list(tmp_path.iterdir()) == []


def test_saved_logits_that_are_not_finite_are_named(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "base"
    run("-m", "model", "--save-logits", str(file))
    data = bytearray(file.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    file.write_bytes(data)
    assert f"{file}: there are logits that are not finite" in run(
        "-m", "model", "--against-logits", str(file), status=1
    )


def test_a_missing_text_and_a_missing_tokenizer(
    run: Run, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no tokenizer" in run("-m", str(write(tmp_path / "mute")), status=1)
    with pytest.raises(SystemExit) as done:
        main(["perplexity", "no\x1b]0;where.txt", "-m", "model"])
    assert done.value.code == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "no\\x1b]0;where.txt" in said
    (tmp_path / "empty").touch()
    with pytest.raises(SystemExit):
        main(["perplexity", str(tmp_path / "empty"), "-m", "plain", "--ctx", CTX])
    assert capsys.readouterr().err.strip().endswith("(give a longer text)")
