"""Where fetched models are kept, and how a model enters: whole, or not at all.

An entry is a folder with a model's files and a note, ``inferflow-source.json``, that says where they came from. It is
made in a staging folder beside the entries and moved into place by one rename, so whatever is interrupted leaves
nothing that looks complete, and of two processes that fetch the same model one wins and both use it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inferflow.errors import FetchError

__all__ = ["Note", "Progress", "default_cache_dir", "publish", "read_note", "require_space", "staging"]

# phase ("download" | "extract"), bytes done, bytes in all or None where that is not known
Progress = Callable[[str, int, int | None], None]

_NOTE = "inferflow-source.json"
_STALE_SECONDS = 24 * 3600
_FIX = "set INFERFLOW_CACHE to a folder that can be written"


@dataclass(frozen=True)
class Note:
    """What an entry holds. `model` is the file that a loader is given, or "" for the folder; `files` maps each file's
    name to its size in bytes and its SHA-256 in hex."""

    source: str
    version: str
    model: str
    files: Mapping[str, tuple[int, str]]


def default_cache_dir(
    environ: Mapping[str, str] = os.environ, platform: str = sys.platform, home: Path | None = None
) -> Path:
    """``$INFERFLOW_CACHE``, else the platform's folder for caches with ``inferflow`` appended. FetchError without a home."""
    if own := environ.get("INFERFLOW_CACHE"):
        return Path(os.path.expanduser(own))
    try:
        home = home or Path.home()
    except RuntimeError:  # no HOME, and a user whom the system does not know
        raise FetchError("there is no home directory to keep models in", where="cache", fix=_FIX) from None
    if platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "inferflow"
    if platform == "darwin":
        return home / "Library" / "Caches" / "inferflow"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "inferflow"


def read_note(entry: Path) -> Note | None:
    """The note of a complete entry; None where there is none, or a file is missing or has not the size that was noted.

    Checksums are not computed again: that would cost a read of the whole model at every start."""
    try:
        raw = json.loads((entry / _NOTE).read_text(encoding="utf-8"))
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in raw["files"].items()}
        note = Note(str(raw["source"]), str(raw["version"]), str(raw["model"]), files)
        whole = all((entry / name).stat().st_size == size for name, (size, _) in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return note if whole and files and (not note.model or note.model in files) else None


@contextmanager
def staging(cache: Path, where: str) -> Iterator[Path]:
    """A fresh folder on the disk of `cache`, removed on the way out, whatever happens (Ctrl-C as well)."""
    parent = cache / "staging"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        folder = tempfile.TemporaryDirectory(prefix="fetch-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise FetchError(f"the cache {cache} cannot be written: {error.strerror}", where=where, fix=_FIX) from error
    with folder as name:
        yield Path(name)


def _sweep(parent: Path) -> None:
    """Removes what killed processes left behind. A day untouched is dead: a running download writes all the time."""
    limit = time.time() - _STALE_SECONDS
    for folder in parent.glob("fetch-*"):
        try:
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        except OSError:  # another process is removing it
            continue
        if newest < limit:
            shutil.rmtree(folder, ignore_errors=True)


def publish(staged: Path, entry: Path, note: Note) -> None:
    """Writes the note into `staged` and moves that folder to `entry`, unless a complete entry has come there meanwhile.

    A broken entry is replaced. `staged` lies in a `staging` folder."""
    raw = {"source": note.source, "version": note.version, "model": note.model, "files": dict(note.files)}
    (staged / _NOTE).write_text(json.dumps(raw, indent=1), encoding="utf-8")
    entry.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(3):
        try:
            staged.rename(entry)
            return
        except OSError as error:  # a folder is there: a directory is renamed onto an empty one at most
            if read_note(entry) == note:
                return
            if attempt == 2 or not entry.exists():
                raise FetchError(
                    f"the model could not be moved into the cache: {error.strerror}", where=str(entry), fix=_FIX
                ) from error
            _set_aside(entry, staged.parent / f"broken-{attempt}")


def _set_aside(entry: Path, broken: Path) -> None:
    try:
        entry.rename(broken)
    except FileNotFoundError:
        return  # another process did it first


def require_space(folder: Path, size: int, where: str) -> None:
    """Raises `FetchError` unless the disk of `folder` has `size` bytes free, and a little more."""
    free = shutil.disk_usage(folder).free
    if free < size + (16 << 20):
        raise FetchError(
            f"{size / 1e6:.0f} MB are needed in {folder}, and {free / 1e6:.0f} MB are free",
            where=where,
            fix="make room, or set INFERFLOW_CACHE to a folder on another disk",
        )
