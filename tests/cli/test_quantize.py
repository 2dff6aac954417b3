"""``inferflow quantize``: from a checkpoint and a text to a directory, and what it says."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from inferflow.cli.quantize import check_rotation, limit_threads
from inferflow.errors import ArgumentError
from inferflow.runtime.model import load_model
from tests import tiny
from tests.cli.test_cli import Run, run  # noqa: F401 - a fixture

WIDE = {**tiny.CONFIG, "hidden_size": 128, "intermediate_size": 192, "vocab_size": 256, "max_position_embeddings": 32}
TEXT = " ".join(f"w{n * n % 250}" for n in range(700))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary is words."""
    folder = tiny.write(tmp_path_factory.mktemp("wide") / "m", WIDE, tiny.tensors(WIDE))
    engine = Tokenizer(models.WordLevel({f"w{n}": n for n in range(256)}, unk_token="w0"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.save(str(folder / "tokenizer.json"))
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


def test_it_says_what_it_made(run: Run, model: Path, tmp_path: Path) -> None:  # noqa: F811
    result = run("quantize", str(model), "--to", "q3.5,attn_k=q8", "-o", str(tmp_path / "q"))
    assert (result.status, result.err) == (0, "")
    assert "bits per weight" in result.out.splitlines()[0]
    assert "q3.5" in result.out
    again = run("quantize", str(model), "--to", "q4", "-o", str(tmp_path / "q"))
    assert again.status == 2
    assert "is there already (give another name, or --force)" in again.err
    forced = run(
        "quantize", str(model), "--to", "q4", "-o", str(tmp_path / "q"), "--force", "--json", "--rotation", "0"
    )
    report = json.loads(forced.out)
    assert report["formats"]["q4"]["tensors"] == 16
    assert report["to"] == "q4"
    assert report["fallbacks"] == []
    assert report["bytes"] == (tmp_path / "q" / "model.safetensors").stat().st_size
    loaded = load_model(tmp_path / "q")
    assert loaded.weights.stored("layers.0.ffn_up.weight").rotation == 0
    assert loaded.config["quantization_config"]["to"] == "q4"
    told = run("info", str(tmp_path / "q"), "--json")
    assert told.status == 0
    assert json.loads(told.out)["spec"] == "llama"


def test_calibrated_on_a_text(run: Run, model: Path, tmp_path: Path) -> None:  # noqa: F811
    text = str(model.parent / "text.txt")
    args = ["--to", "q3", "--calibrate", text, "--calibrate-tokens", "256", "--json"]
    result = run("quantize", str(model), "-o", str(tmp_path / "q"), *args)
    assert (result.status, result.err) == (0, "")
    report = json.loads(result.out)
    assert report["calibrated_on"] == {"text": "text.txt", "tokens": 256}
    assert load_model(tmp_path / "q").config["quantization_config"]["calibrated_on"] == report["calibrated_on"]
    assert run("generate", "w1 w2 w3", "-m", str(tmp_path / "q"), "-n", "2", "--raw").status == 0
    plain = run("quantize", str(model), "-o", str(tmp_path / "p"), "--to", "q3", "--json")
    assert json.loads(plain.out)["bytes"] == report["bytes"]
    key = "layers.1.ffn_down.weight"
    one, other = (load_model(tmp_path / name).weights.stored(key) for name in ("q", "p"))
    assert one.codes.tobytes() != other.codes.tobytes()
    piped = run(
        "quantize", str(model), "-o", str(tmp_path / "s"), "--to", "q3", "--calibrate", "-", stdin=TEXT.encode()
    )
    assert piped.status == 0


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["--to", "q5"], 2, "--to: 'q5' is no format"),
        (["--to", "q4,attn_z=q8"], 2, "--to: 'attn_z' names no matrix"),
        (["--to", "q3.5,"], 2, "'q3.5,' has an empty part"),
        (["--to", "q4", "--rotation", "48"], 2, "--rotation: it is 48"),
        (["--to", "q4", "--rotation", "-1"], 2, "--rotation"),
        (["--to", "q4", "--calibrate", "/no/such"], 2, "No such file"),
        (["--to", "q4", "--calibrate", sys.executable], 2, "--calibrate: it is no text"),
        (["--to", "q4", "--threads", "0"], 2, "--threads"),
        (["--to", "q4", "-o", "/no/such/place"], 2, "there is no directory"),
        (["--to", "q4", "-o", "/"], 2, "is no name for a new directory"),
        ([], 2, "--to"),
    ],
)
def test_what_is_refused(args: list[str], status: int, said: str, run: Run, model: Path, tmp_path: Path) -> None:  # noqa: F811
    out = [] if "-o" in args else ["-o", str(tmp_path / "q")]
    result = run("quantize", str(model), *out, *args)
    assert result.status == status
    assert said in result.err
    assert not list(tmp_path.iterdir())


def test_force_is_advised_only_where_it_helps(run: Run, model: Path, tmp_path: Path) -> None:  # noqa: F811
    for number, make in enumerate((Path.touch, Path.mkdir, lambda out: tiny.write(out))):
        out = tmp_path / str(number)
        make(out)
        (tmp_path / "1" / "x").touch() if number == 1 else None
        result = run("quantize", str(model), "--to", "q8", "-o", str(out))
        assert result.status == 2
        assert "is no directory that 'inferflow quantize' made (give another name, or remove it yourself)" in result.err


def test_the_disk_is_full(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("inferflow.weights.safetensors_write.SafetensorsWriter._write", full)
    result = run("quantize", str(model), "--to", "q8", "-o", str(tmp_path / "q"))
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith(f"error: {tmp_path / 'q'}: No space left on device (free some space")
    monkeypatch.setattr(
        "tempfile.mkdtemp", lambda *args: (_ for _ in ()).throw(OSError(30, "Read-only", ".inferflow-x"))
    )
    result = run("quantize", str(model), "--to", "q8", "-o", str(tmp_path / "q"))
    assert result.err == f"error: {tmp_path / 'q'}: Read-only (write to another place)\n"
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_too_short(run: Run, model: Path, tmp_path: Path) -> None:  # noqa: F811
    result = run(
        "quantize", str(model), "--to", "q4", "-o", str(tmp_path / "q"), "--calibrate", "-", stdin=b"w1 w2 w3 w4"
    )
    assert result.status == 2
    assert "--calibrate: it has 4 tokens, fewer than one window of 32 (give a longer text)" in result.err


def test_a_model_without_a_tokenizer(run: Run, tmp_path: Path) -> None:  # noqa: F811
    folder = tiny.write(tmp_path / "m")
    result = run(
        "quantize", str(folder), "--to", "q4", "-o", str(tmp_path / "q"), "--calibrate", "-", stdin=TEXT.encode()
    )
    assert result.status == 1
    assert "the model has no tokenizer" in result.err


def test_what_falls_back_is_told(run: Run, tmp_path: Path) -> None:  # noqa: F811
    folder = tiny.write(tmp_path / "m")
    result = run("quantize", str(folder), "--to", "q4", "-o", str(tmp_path / "q"))
    assert result.status == 0
    assert "layers.0.attn_q.weight is keep, not q4: it has only 1024 elements" in result.out
    assert "more that keep the file's format" in result.out


def test_progress_goes_to_a_terminal(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inferflow.cli import quantize

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(quantize.sys, "stderr", screen)
    quantize.quantize.callback(  # type: ignore[misc]
        str(model), "q8", tmp_path / "q", None, threads=None, rotation=None, force=False, offline=True, spec_name=None,
        as_json=True, calibrate_tokens=64,
    )  # fmt: skip
    assert "quantising   [" in screen.getvalue()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_threads_are_processors() -> None:
    before = os.sched_getaffinity(0)
    try:
        limit_threads(1)
        assert len(os.sched_getaffinity(0)) == 1
        limit_threads(None)
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_rotations() -> None:
    assert [check_rotation(n) for n in (0, 2, 64, 65536)] == [0, 2, 64, 65536]
    for width in (1, 3, 48, -64, 1 << 17):
        with pytest.raises(ArgumentError):
            check_rotation(width)
