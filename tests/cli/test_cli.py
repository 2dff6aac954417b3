"""The shell surface, command by command: what goes to stdout, what to stderr, and the exit status."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from inferflow.cli.main import main
from inferflow.kernels import native
from inferflow.spec.library import list_specs
from tests.tiny import CONFIG, tensors, write


@dataclass
class Result:
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``inferflow ARGS``, with bytes on stdin."""

    def call(*args: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as done:
            main(list(args))
        seen = capsys.readouterr()
        assert "Traceback" not in seen.err
        return Result(int(done.value.code or 0), seen.out, seen.err)

    return call


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


def test_generate_streams_text(run: Run, smollm2_path: Path) -> None:
    asked = run("generate", "Name the capital of France.", "-m", str(smollm2_path))
    assert (asked.status, asked.out, asked.err) == (0, "The capital of France is Paris.\n", "")
    raw = run("generate", "The capital of France is", "--raw", "-n", "1", "-m", str(smollm2_path), "--stats")
    assert raw.out == " Paris\n"
    assert "5 + 1 tokens" in raw.err
    piped = run("generate", "--raw", "-n", "1", "-m", str(smollm2_path), stdin=b"The capital of France is")
    assert piped.out == " Paris\n"
    echoed = run("generate", "-m", str(smollm2_path), stdin=b"Name the capital of France.\n")
    assert echoed.out == asked.out


def test_generate_for_machines(run: Run, smollm2_path: Path) -> None:
    args = ["-m", str(smollm2_path), "--json", "-n", "6", "--temperature", "0.9", "--top-k", "40", "--top-p", "0.9"]
    result = run(
        "generate", "Tell me a story", *args, "--min-p", "0.01", "--seed", "3", "--system", "Be brief.", "--ignore-eos"
    )
    report = json.loads(result.out)
    assert report["tokens"] == len(report["ids"]) == 6
    assert (report["finish"], report["spec"], report["chat"]) == ("length", "llama", True)
    assert set(report["timings"]) == {"first_token_s", "total_s", "decode_tokens_per_s"}
    again = run(
        "generate", "Tell me a story", *args, "--min-p", "0.01", "--seed", "3", "--system", "Be brief.", "--ignore-eos"
    )
    assert json.loads(again.out)["ids"] == report["ids"]


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["generate", "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", "x", "-n", "0"], 2, "0 is not in the range"),
        (["generate", "x", "--stop", ""], 2, "stop"),
        (["generate"], 2, "stdin is empty"),
        (["generate", "x", "-m", "/no/such/model"], 1, "there is no such model"),
        (["generate", "x", "--spec", "lama"], 1, "did you mean 'llama'"),
        (["generate", "x", "--nonsense"], 2, "No such option"),
        (["frobnicate"], 2, "No such command"),
        (["generat"], 2, "No such command 'generat' (did you mean 'generate'?)"),
        ([], 2, "\nCommands:\n"),
        (["spec"], 2, "\nCommands:\n"),
        (["spec", "show", "nope"], 1, "there is no spec called 'nope'"),
        (["spec", "check", "missing.toml"], 1, "there is no such file"),
        (["spec", "new", "--like", "lama"], 1, "did you mean 'llama'"),
        (["pull", "pypi:../evil"], 1, "pypi:"),
        (["info", ""], 1, "there is no such model"),
        (["generate", "x", "--engine", "reference", "--isa", "nonsense"], 2, "--isa: there is no instruction set"),
    ],
)
def test_refusals(run: Run, tiny: Path, args: list[str], status: int, words: str) -> None:
    if args[:1] in (["generate"], ["spec"]) and args != ["spec"] and "-m" not in args and args[:2] != ["spec", "new"]:
        args = [*args, "-m", str(tiny)]
    result = run(*args)
    assert result.status == status
    assert words in result.err + result.out


def test_generate_without_a_tokenizer_says_so(run: Run, tiny: Path) -> None:
    result = run("generate", "hello", "-m", str(tiny))
    assert result.status == 1
    assert "no tokenizer" in result.err


def test_info(run: Run, tiny: Path, smollm2_path: Path) -> None:
    report = json.loads(run("info", str(smollm2_path), "--json", "--tensors").out)
    assert (report["format"], report["spec"], report["layers"], report["vocab"]) == ("gguf", "llama", 30, 49152)
    assert report["parameters"] == 134515008
    assert len(report["tensors"]) == 272
    assert report["tokenizer"]["eos"]
    assert report["engine"]["name"] == ("native" if native.available() else "reference (NumPy)")
    assert not native.available() or (report["engine"]["isa"], report["engine"]["threads"]) == (
        native.isa_name(),
        native.default_threads(),
    )
    by_tensor = {t["name"]: t["bits_per_weight"] for t in report["tensors"]}
    assert (by_tensor["blk.0.attn_q.weight"], by_tensor["output_norm.weight"]) == (5, 32)
    assert sum(t["bytes"] for t in report["tensors"]) == report["bytes"]
    people = run("info", "-m", str(tiny)).out
    assert "safetensors" in people
    assert str(sum(w.size for w in tensors().values())) in people.replace(",", "")


def test_names_in_a_models_files_are_no_commands_to_a_terminal(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "q"
    assert run("quantize", str(write(tmp_path / "m")), "--to", "q8", "-o", str(out)).status == 0
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["spec"] = "x\x1b]0;pwn\x07\nspec forged"
    (out / "config.json").write_text(json.dumps(config))
    told = run("info", str(out)).out
    assert "\x1b" not in told
    assert "\nspec forged" not in told
    assert "x\\x1b]0;pwn\\x07\\nspec forged" in told


def test_spec_list_and_show(run: Run, tiny: Path) -> None:
    listed = run("spec", "list").out
    rows = json.loads(run("spec", "list", "--json").out)
    assert {row["spec"] for row in rows} <= set(list_specs())
    assert all(row["spec"] in listed for row in rows)
    shown = run("spec", "show", "-m", str(tiny), "--layer", "1").out
    assert "layers.1.attn.attn_q [tokens, heads*head_dim=32] = linear" in shown
    assert "layers.0" not in shown.replace("layers.0.x", "")
    assert "layers.0.attn_norm" in run("spec", "show", "-m", str(tiny), "--all").out
    assert run("spec", "show", "-m", str(tiny), "--mermaid").out.startswith("flowchart TD")
    by_config = run("spec", "show", "llama", "--config", str(tiny / "config.json"), "--layer", "1")
    assert by_config.out == shown
    assert run("spec", "show", "-m", str(tiny), "--layer", "2").status == 2


def test_spec_check_finds_everything(run: Run, tiny: Path, tmp_path: Path) -> None:
    assert run("spec", "check", "llama", "-m", str(tiny)).status == 0
    bad = tmp_path / "bad.toml"
    bad.write_text('extends = "llama"\n\n[tensors.layers]\nattn_q = "model.layers.{i}.self_attn.qproj"\n')
    result = run("spec", "check", str(bad), "-m", str(tiny))
    assert result.status == 1
    assert result.out.count("error: ") == 1  # told once, not for each layer, and not again as unused tensors
    assert f"{bad}:4:10: 'layers.0.attn_q.weight' has no tensor" in result.out
    assert "did you mean 'model.layers.0.self_attn.q_proj.weight'?" in result.out
    report = json.loads(run("spec", "check", str(bad), "-m", str(tiny), "--json").out)
    assert (report["ok"], len(report["problems"])) == (False, 1)
    both = tmp_path / "both.toml"
    both.write_text(bad.read_text() + 'attn_k = "nothing.like.it"\n')
    assert run("spec", "check", str(both), "-m", str(tiny)).out.count("error: ") >= 2
    typo = tmp_path / "typo.toml"
    typo.write_text('extends = "llama"\n\n[layers.attn]\nwindw = 4\n')
    result = run("spec", "check", str(typo), "-m", str(tiny))
    assert f"{typo}:4:9" in result.out
    assert "did you mean 'window'?" in result.out


def test_spec_check_notes_what_may_be_an_oversight(run: Run, tmp_path: Path) -> None:
    config = {**CONFIG, "num_hidden_layers": 1, "attn_logit_softcapping": 30.0}
    folder = write(tmp_path / "model", config, tensors())
    result = run("spec", "check", "llama", "-m", str(folder))
    assert result.status == 0
    notes = [line for line in result.out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2
    assert "left out: 9 tensors of layers >= 1" in result.out
    assert "attn_logit_softcapping" in result.out
    assert len(json.loads(run("spec", "check", "llama", "-m", str(folder), "--json").out)["notes"]) == 2


def test_spec_new_writes_a_file_that_works(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    assert run("spec", "new", "--like", "llama", "-m", str(tiny), "-o", str(file)).status == 0
    assert run("spec", "check", str(file), "-m", str(tiny)).status == 0
    assert run("spec", "new", "--like", "llama", "-o", str(file)).status == 2
    for name in list_specs():
        assert f'extends = "{name}"' in run("spec", "new", "--like", name).out


def test_every_comment_of_a_new_spec_can_be_uncommented(run: Run, tiny: Path, tmp_path: Path) -> None:
    text = run("spec", "new", "--like", "llama", "-m", str(tiny)).out
    head, _, rest = text.partition("\n# [model]")
    opened = head + "\n[model]" + "\n".join(line.removeprefix("# ") for line in rest.split("\n"))
    file = tmp_path / "open.toml"
    file.write_text(opened)
    assert run("spec", "check", str(file), "-m", str(tiny)).out.startswith(str(file))


def test_spec_verify_agrees_and_can_disagree(run: Run, tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    result = run("spec", "verify", "-m", str(folder))
    assert result.status == 0
    assert result.out.startswith("agree: greatest difference")
    assert "48 made-up tokens" in result.out
    assert "token by token equal" in result.out
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('extends = "llama"\n\n[layers.attn.rope]\npairing = "inter"\n')
    result = run("spec", "verify", str(wrong), "-m", str(folder), "--json")
    assert result.status == 1
    report = json.loads(result.out)
    assert report["max_difference"] > 1e-3
    assert report["departs"].startswith("layers.0 (differs by")
    assert (
        run("spec", "verify", str(wrong), "-m", str(folder)).out.splitlines()[1].startswith("first departure: layers.0")
    )


def test_a_closed_pipe_is_no_error(smollm2_path: Path) -> None:
    command = f"{sys.executable} -m inferflow.cli info {smollm2_path} --tensors | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("path")
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_help_is_quick_and_complete(run: Run) -> None:
    text = run("--help").out
    for command in ("bench", "chat", "generate", "info", "perplexity", "pull", "spec"):
        assert command in text
        assert "Usage" in run(command, "--help").out


def test_a_warning_reaches_the_user(run: Run, tmp_path: Path) -> None:
    weights = tensors()
    folder = write(tmp_path, {**CONFIG, "tie_word_embeddings": True}, weights)
    assert "lm_head.weight" in run("info", str(folder)).out
    weights["extra.weight"] = np.zeros(3, np.float32)
    result = run("info", str(write(tmp_path / "b", CONFIG, weights)))
    assert result.status == 1
    assert "extra.weight" in result.err


def test_generating_imports_neither_torch_nor_transformers(smollm2_path: Path) -> None:
    code = (
        "import sys\nfrom inferflow.cli.main import main\n"
        f"try: main(['generate', 'The capital of France is', '--raw', '-n', '1', '-m', {str(smollm2_path)!r}])\n"
        "except SystemExit as done: assert not done.code\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == " Paris\n[]\n"
