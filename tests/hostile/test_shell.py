"""The command in odd surroundings: closed and full streams, another locale, no home, an interrupt, odd paths."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inferflow.cli.main import ending_on_signals, main
from inferflow.errors import FetchError
from inferflow.weights.cache import default_cache_dir
from tests.tiny import write

COMMAND = f"{sys.executable} -m inferflow.cli"
FULL = "No space left on device (free some space, or write to another disk)"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams(tiny: Path, smollm2_path: Path, closed: str) -> None:
    assert shell(f"{COMMAND} info {tiny} {closed}").returncode == 0
    done = shell(f"{COMMAND} generate hi -n 1 -m {smollm2_path} {closed}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "" if closed.startswith(">") else "Hello\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk(tiny: Path, smollm2_path: Path) -> None:
    for line in (
        f"info --tensors {tiny}",
        f"generate hi -n 1 -m {smollm2_path}",
        f"generate hi --json -n 1 -m {smollm2_path}",
    ):
        done = shell(f"{COMMAND} {line} > /dev/full")
        assert (done.returncode, done.stderr) == (1, f"error: stdout: {FULL}\n")


def test_a_locale_of_ascii(smollm2_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    line = f"{COMMAND} generate --raw 'Café 你好 é' -n 6 -m {smollm2_path}"
    want = json.loads(shell(f"{line} --json").stdout)
    done = shell(f"{line} --json", **ascii_only)
    assert done.stdout.isascii()
    assert {**json.loads(done.stdout), "timings": 0} == {**want, "timings": 0}
    text = shell(line, **ascii_only)
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout.rstrip("\n") == want["text"].encode("ascii", "replace").decode().rstrip("\n")


def test_an_argument_that_is_not_utf8(smollm2_path: Path, tiny: Path) -> None:
    done = shell(f"{COMMAND} generate $'ab\\xff' --json -n 1 -m {smollm2_path}", PYTHONIOENCODING="utf-8:strict")
    assert json.loads(done.stdout)["prompt"] == "ab\ufffd"
    done = shell(f"{COMMAND} info {tiny}/$'x\\xff'", PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == 1
    assert "there is no such model" in done.stderr


@pytest.mark.usefixtures("plain_signals")
def test_an_interrupt_in_the_middle(smollm2_path: Path) -> None:
    words = [*COMMAND.split(), "generate", "Tell me a story", "-n", "2000", "--ignore-eos", "-m", str(smollm2_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.read(1)  # it is answering
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert first
    assert process.returncode == 130
    assert err.strip() == ""
    assert time.monotonic() - start < 30


@pytest.mark.usefixtures("plain_signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_leaves_nothing_half_written(tiny: Path, tmp_path: Path, name: str) -> None:
    """The command is caught in the midst of writing: it waits in the first weight that it adds."""
    code = (
        "import sys, time\nfrom inferflow.cli.main import main\nfrom inferflow.weights.directory import DirectoryWriter\n"
        "def wait(*args):\n    print('writing', flush=True)\n    time.sleep(60)\n"
        "DirectoryWriter.add = wait\nmain(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, "quantize", str(tiny), "--to", "q8", "-o", str(tmp_path / "q")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    assert len(list(tmp_path.iterdir())) == 1
    number = getattr(signal, name)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []


def test_an_ignored_signal_stays_ignored_and_handlers_are_given_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with ending_on_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_odd_paths(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a folder 模型 é'\"$x"
    shutil.copytree(tiny, odd)
    (tmp_path / "link").symlink_to(odd)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(odd)
    for path in (
        str(odd),
        f"{odd}/",
        f"{odd}//",
        str(tmp_path / "link"),
        f"{tmp_path}/link/",
        ".",
        "model.safetensors",
    ):
        with pytest.raises(SystemExit) as done:
            main(["info", path])
        assert done.value.code == 0, capsys.readouterr()
    for path in ("loop", "gone", "link/nothing", "link/model.safetensors/x", "x" * 300, "-"):
        with pytest.raises(SystemExit) as done:
            main(["info", "--", str(tmp_path / path)])
        assert done.value.code == 1
        assert capsys.readouterr().err.count("error: ") == 1


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(FetchError, match="no home") as caught:
        default_cache_dir({}, "linux")
    assert "INFERFLOW_CACHE" in caught.value.fix
    assert default_cache_dir({"INFERFLOW_CACHE": "~nobody-of-this-name/x"}, "linux") == Path("~nobody-of-this-name/x")


def test_a_model_given_twice(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["info", str(tiny), "-m", str(tiny)])
    assert done.value.code == 2
    assert "given twice" in capsys.readouterr().err


def test_out_of_memory_and_other_troubles(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = "Unable to allocate 9 GiB for an array with shape (1,)"
    troubles: list[tuple[Exception, str]] = [
        (MemoryError(shape), "not enough memory (Unable to allocate 9 GiB for an array)"),
        (MemoryError(), "not enough memory"),
        (OSError(5, "Input/output error", "model.bin"), "model.bin: Input/output error"),
    ]
    for trouble, words in troubles:

        def fail(*arguments: object, trouble: Exception = trouble) -> None:
            raise trouble

        monkeypatch.setattr("inferflow.runtime.model.open_source", fail)
        with pytest.raises(SystemExit) as done:
            main(["info", str(tiny)])
        assert done.value.code == 1
        assert words in capsys.readouterr().err
