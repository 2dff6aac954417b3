"""The config file: what it may say, what wins over what, and where a refusal says that a fault is."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click
import pytest

from inferflow.cli.config import use_config
from inferflow.cli.effective import configured
from inferflow.cli.main import main
from inferflow.cli.options import model_options
from inferflow.runtime.recommended import recommended_params
from tests.cli.words import words_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``inferflow ARGS`` in a folder whose inferflow.toml has this text: status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))

    def call(config: str | None, *args: str) -> tuple[int, str, str]:
        if config is not None:
            (tmp_path / "inferflow.toml").write_text(config, "utf-8")
        with pytest.raises(SystemExit) as done:
            main(list(args))
        seen = capsys.readouterr()
        assert "Traceback" not in seen.err
        return int(done.value.code or 0), seen.out, seen.err

    return call


def values(run: Run, config: str | None, *args: str) -> dict[str, tuple[Any, str]]:
    """What ``--show-config --json`` tells of each option: its value, and where that is from."""
    status, out, err = run(config, *args, "--show-config", "--json")
    assert status == 0, err
    return {key: (row["value"], row["from"]) for key, row in json.loads(out)["values"].items()}


EVERYTHING = """\
threads = 3
kv = "f16"
model = "small"

[generate]
max-tokens = 7
temperature = 1
stop = ["a", "b"]
chat = false
kv = "bf16"

[models.small]
model = "org/small"
spec = "mine.toml"
temperature = 0.5
seed = 4

[models.other]
model = "/path/other"
"""


def test_what_wins(run: Run) -> None:
    shown = values(run, EVERYTHING, "generate", "--threads", "2")
    assert shown["threads"] == (2, "flag")
    assert shown["kv"] == ("bf16", "inferflow.toml:10:6")
    assert shown["model"] == ("org/small", "inferflow.toml:13:9")
    assert shown["spec"] == ("mine.toml", "inferflow.toml:14:8")
    assert shown["temperature"] == (0.5, "inferflow.toml:15:15")
    assert shown["stop"] == (["a", "b"], "inferflow.toml:8:8")
    assert shown["chat"] == (False, "inferflow.toml:9:8")
    assert shown["top-p"] == (1.0, "default")
    other = values(run, None, "generate", "-m", "other", "--temperature", "0")
    assert other["model"] == ("/path/other", "inferflow.toml:19:9")
    assert other["temperature"] == (0.0, "flag")  # a zero that is said counts
    assert other["spec"] == (None, "default")
    assert values(run, None, "generate", "-m", "elsewhere")["model"] == ("elsewhere", "flag")
    bench = values(run, None, "bench")
    assert (bench["kv"], bench["threads"]) == (("f16", "inferflow.toml:2:6"), (3, "inferflow.toml:1:11"))


def test_the_file_of_the_readme(run: Run) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    shown = values(run, re.search(r"```toml\n(# inferflow.toml\n.*?)```", readme, re.DOTALL)[1], "generate")  # type: ignore[index]
    assert [shown[key][0] for key in ("model", "quant", "threads", "system", "max-tokens")] == [
        "org/name", "q3.5", 8, None, 400,
    ]  # fmt: skip


def test_which_file(run: Run, tmp_path: Path) -> None:
    home = tmp_path / "home" / "inferflow" / "inferflow.toml"
    home.parent.mkdir(parents=True)
    home.write_text("threads = 5\n")
    assert values(run, None, "bench")["threads"] == (5, f"{home}:1:11")
    assert values(run, "kv = 'f32'\n", "bench")["threads"] == (None, "default")  # one file, not two
    (tmp_path / "third.toml").write_text("threads = 6\n")
    status, out, _ = run(None, "--config", "third.toml", "bench", "--show-config")
    assert (status, out.splitlines()[0]) == (0, "config file: third.toml")
    assert run(None, "--no-config", "bench", "--show-config")[1].startswith("config file: none\n")
    assert run(None, "--config", "third.toml", "--no-config", "bench")[0] == 2
    assert "No such file" in run(None, "--config", "fourth.toml", "bench")[2]


def test_it_reaches_the_command_and_its_models(run: Run, tmp_path: Path) -> None:
    model = words_model(tmp_path / "model")
    config = (
        f'[models.tiny]\nmodel = "{model}"\nmax_tokens = 3\njson = true\nquant = "bf16"\n\n[spec.show]\nlayer = 1\n'
    )
    report = json.loads(run(config, "generate", "w3 w4", "-m", "tiny")[1])
    assert (report["model"], report["tokens"]) == (str(model), 3)
    assert json.loads(run(None, "info", "tiny")[1])["path"].startswith(str(model))
    assert run(None, "pull", "tiny")[1].strip() == str(model)
    assert "layers.1.attn_norm" in run(None, "spec", "show", "-m", "tiny")[1]
    status, out, err = run(None, "quantize", "tiny", "--to", "q8", "-o", "smaller")
    assert (status, json.loads(out)["path"]) == (0, "smaller"), err


def test_a_model_that_is_given_wins_over_the_files_own(run: Run, tmp_path: Path) -> None:
    model = words_model(tmp_path / "model")
    config = '[models.a]\nmodel = "nowhere"\nspec = "nothing.toml"\n[info]\nmodel = "a"\n'
    status, out, err = run(config, "info", str(model), "--json")
    assert status == 0, err
    assert json.loads(out)["path"].startswith(str(model))
    assert run(None, "info", str(model), "-m", str(model))[0] == 2


@pytest.mark.parametrize(
    ("config", "place", "words"),
    [
        ("tempreture = 1", "1:14", "did you mean 'temperature'?"),
        ("[generate]\nrepeat = 1", "2:10", "there is no option 'repeat' here"),
        ("[generate]\n\nmax_tokns = 1", "3:13", "did you mean 'max-tokens'?"),
        ("[generat]\nseed = 1", "1:1", "did you mean 'generate'?"),
        ("[spec]\nlayer = 1", "2:9", "there is no option 'layer' here"),
        ("[spec.show]\nlyer = 1", "2:8", "did you mean 'layer'?"),
        ("[spec.shwo]\nlayer = 1", "1:1", "did you mean 'show'?"),
        ("bench = 1", "1:9", "write a table: [bench]"),
        ("[models]\nsmall = 'x'", "2:9", "write a table: [small]"),
        ("[models.small]\nkv = 'f16'", "1:1", "it names no model"),
        ("[models.small.generate]\nseed = 1", "1:1", "there is no table 'generate' here"),
        ("[threads]\nmany = 1", "1:1", "'threads' is a table"),
        ("[[models]]\nmodel = 'x'", "1:1", "arrays of tables are not used here"),
        ("models = 'x'", "1:10", "write a table: [models]"),
        ("[models.small]\nmodel = 'x'\nkw = 'f16'", "3:6", "there is no option 'kw' here"),
        ("[models.small]\nmodel = 3", "2:9", "write a string"),
        ("threads = 'two'", "1:11", "write a whole number"),
        ("threads = 2.0", "1:11", "write a whole number"),
        ("threads = true", "1:11", "write a whole number"),
        ("[generate]\ntemperature = '1'", "2:15", "write a number"),
        ("[generate]\nstop = 'x'", "2:8", "write a list, each a string"),
        ("[generate]\nstop = ['x', 1]", "2:8", "write a list, each a string"),
        ("[generate]\nchat = 'yes'", "2:8", "write true or false"),
        ("kv = ['f16']", "1:6", "'kv' is a list"),
        ("[generate]\nmax-tokens = 1\nmax_tokens = 2", "3:14", "'max-tokens' is given twice"),
        ("threads = 2\nthreads = 3", "2:12", "not valid TOML"),
        ("kv = 'int4'", "1:6", "'int4' is not one of"),
        ("threads = 0", "1:11", "0 is not in the range"),
        ("[generate]\ntemperature = -1", "2:15", "--temperature: it is -1"),
        ("[generate]\nquant = 'q5'", "2:9", "'q5' is no format"),
    ],
)  # fmt: skip
def test_faults_have_a_place(run: Run, tmp_path: Path, config: str, place: str, words: str) -> None:
    model = words_model(tmp_path / "model")
    status, out, err = run(config, "generate", "w3", "-m", str(model))
    assert (status, out) == (2, "")
    assert f"inferflow.toml:{place}" in err
    assert words in err
    assert run(None, "--no-config", "generate", "w3", "-m", str(model))[0] == 0


def test_a_command_that_nobody_foresaw(tmp_path: Path) -> None:
    """One that runs something by itself and has another inside, with options of every kind."""

    @click.group(invoke_without_command=True)
    @click.option("--repeat", type=int, default=1)
    @click.option("-v", "--verbose", count=True)
    @click.option("--api-key")
    @click.option("--json", "as_json", is_flag=True)
    def bench(**values: Any) -> None:
        told.append(values)

    @bench.command()
    @click.option("--range", "bounds", nargs=2, type=float)
    @click.option("--json", "as_json", is_flag=True)
    @model_options
    def serve(**values: Any) -> None:
        told.append(values)

    @click.group()
    @click.pass_context
    def group(ctx: click.Context) -> None:
        use_config(ctx, tmp_path / "my.toml")

    def call(*args: str) -> Any:
        with redirect_stdout(io.StringIO()) as out:
            group.main(list(args), standalone_mode=False)
        return json.loads(out.getvalue())["values"] if out.getvalue() else told.pop()

    told: list[dict[str, Any]] = []
    group.add_command(configured(bench), "bench")
    (tmp_path / "my.toml").write_text(
        "model = 'a'\n[bench]\nrepeat = 3\nverbose = 2\napi-key = 'secret'\n[bench.serve]\nrange = [1, 2.5]\n"
        "[models.a]\nmodel = 'org/a'\n[models.b]\nmodel = 'org/b'\nrange = [3, 4]\n"
    )
    assert call("bench") == {"repeat": 3, "verbose": 2, "api_key": "secret", "as_json": False}
    shown = call("bench", "--show-config", "--json")
    assert shown["repeat"] == {"value": 3, "from": f"{tmp_path / 'my.toml'}:3:10"}
    assert shown["api-key"]["value"] == "***"
    assert (call("bench", "serve")["bounds"], told.pop()["repeat"]) == ((1, 2.5), 3)
    chosen = call("bench", "serve", "-m", "b")
    assert (chosen["model"], chosen["bounds"]) == ("org/b", (3, 4))


def test_a_file_that_is_no_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "inferflow.toml").write_bytes(b"threads = 2\nkv = '\xff'\n")
    assert "inferflow.toml:2: it is not UTF-8" in run(None, "bench")[2]
    (tmp_path / "inferflow.toml").write_bytes(b"\xef\xbb\xbfthreads = 2\r\nkv = 'f32'\r\n")
    assert values(run, None, "bench")["kv"] == ("f32", "inferflow.toml:2:6")


def test_a_fault_of_a_flag_has_no_place(run: Run) -> None:
    status, _, err = run("threads = 2\n", "bench", "--threads", "0")
    assert status == 2
    assert "inferflow.toml" not in err


def test_what_the_model_recommends_is_shown(run: Run, tmp_path: Path) -> None:
    model = words_model(tmp_path / "model")
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (model / "generation_config.json").write_text(json.dumps(generation))
    shown = values_of_table(run("[chat]\ntop-p = 0.5\n", "chat", "-m", str(model), "--top-k", "3", "--show-config")[1])
    assert shown["temperature"] == ("0.6", "model")
    assert shown["top-p"] == ("0.5", "inferflow.toml:2:9")
    assert shown["top-k"] == ("3", "flag")
    assert shown["min-p"] == ("0.0", "default")
    assert values(run, None, "generate", "-m", str(model))["temperature"] == (0.0, "default")  # greedy unless told
    status, _, err = run(None, "chat", "-m", "no/where/at/all", "--show-config")
    assert (status, "note: what the model recommends is not known" in err) == (0, True)


def values_of_table(text: str) -> dict[str, tuple[str, str]]:
    return {row[0]: (row[1], row[2]) for row in (line.split() for line in text.splitlines()[1:])}


@pytest.mark.parametrize(
    ("generation", "found", "warnings"),
    [
        (None, {}, 0),
        ("hostile", {}, 0),
        ({"eos_token_id": 2}, {}, 0),
        ({"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "top_p": None},
         {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}, 0),
        ({"do_sample": True, "top_k": 50}, {"temperature": 1.0, "top_k": 50}, 0),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5, "repetition_penalty": 1.2},
         {"temperature": 0.0, "repetition_penalty": 1.2}, 0),
        ({"temperature": "hot\x1b[2J", "top_p": [1] * 99, "top_k": 1e300, "min_p": -1, "typical_p": float("inf")}, {}, 5),
        ({"temperature": True, "top_p": 0, "repetition_penalty": 0, "top_k": 5}, {"top_k": 5}, 3),
    ],
)  # fmt: skip
def test_what_a_model_recommends(generation: Any, found: dict[str, Any], warnings: int) -> None:
    params, told = recommended_params({"generation": generation})
    assert params == found
    assert len(told) == warnings
    assert all("generation_config.json" in text for text in told)
