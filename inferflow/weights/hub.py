"""Models on the Hugging Face hub: from ``org/name[:QUANT]`` to files in the hub library's own cache.

Only what a model needs is fetched: config, tokenizer and safetensors (PyTorch's ``.bin`` where there are none), or the
one GGUF that QUANT picks; never code. The library's settings hold as they are (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). Without a network, what is in the cache is used.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Any, Protocol

from inferflow.errors import FetchError
from inferflow.weights.cache import Progress
from inferflow.weights.listing import gguf_models, narrow, pickle_models, safetensors_models

__all__ = ["Hub", "HuggingFaceHub", "UnreachableError", "fetch_repository", "is_repository"]

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?", re.ASCII)


class UnreachableError(FetchError):
    """There is no way to the hub just now; the cache may do."""


class Hub(Protocol):
    """What is needed of a hub. `repository` is ``org/name``; files are named by their path in it."""

    def listing(self, repository: str) -> list[str]:
        """The repository's files, over the network. `UnreachableError` where that cannot be had."""
        ...

    def cached(self, repository: str) -> list[str]:
        """The files of its main revision that are on this machine; empty where none is."""
        ...

    def fetch(self, repository: str, files: tuple[str, ...], *, local: bool, progress: Progress | None) -> Path:
        """The folder with `files`, downloaded as far as needed; with `local` nothing is."""
        ...


def is_repository(text: str) -> bool:
    """Whether `text` has the form ``org/name`` or ``org/name:QUANT``."""
    return _REPOSITORY.fullmatch(text) is not None and ".." not in text


def fetch_repository(source: str, hub: Hub, *, offline: bool = False, progress: Progress | None = None) -> Path:
    """The model of `source` (``org/name[:QUANT]``): a folder, or a GGUF file (the first of a split one)."""
    repository, _, quant = source.partition(":")
    try:
        names = [] if offline else hub.listing(repository)
    except UnreachableError:
        names, offline = hub.cached(repository), True
        if not names:
            raise
    else:
        if offline:
            names = hub.cached(repository)
        if not names:
            reason = "it is not in the hub's cache, and offline is asked for" if offline else "the repository is empty"
            raise FetchError(reason, where=source, fix="go online once" if offline else "name another one")
    files = _choose(names, quant, source, "in the cache" if offline else "in the repository")
    folder = hub.fetch(repository, files, local=offline, progress=progress)
    return folder / files[0] if files[0].lower().endswith(".gguf") else folder


def _choose(names: list[str], quant: str, source: str, place: str) -> tuple[str, ...]:
    """The files to fetch. Folders in a repository hold other formats of the model, so only GGUFs are sought there."""
    top = [name for name in names if "/" not in name]
    if not quant:
        for models in (safetensors_models(top), pickle_models(top)):
            if models and "config.json" in top:
                return models[0]
    ggufs = gguf_models(names, source)
    found = narrow(ggufs, quant)
    if len(found) == 1:
        return found[0]
    if not ggufs:
        what = "no GGUF file" if quant else "no config.json with .safetensors or .bin files, and no GGUF file"
        raise FetchError(f"there is {what} {place}", where=source, fix="name another repository")
    choices = ", ".join(files[0] for files in (found or ggufs)[:40])
    count = f"{len(found)} GGUF models fit" if found else f"no GGUF model's name contains '{quant}'"
    repository = source.partition(":")[0]
    raise FetchError(f"{count}: {choices}", where=source, fix=f"pick one with {repository}:PART-OF-ITS-NAME")


class HuggingFaceHub:
    """`Hub` by the `huggingface_hub` library, which is imported on first use (it takes a while)."""

    def listing(self, repository: str) -> list[str]:
        from huggingface_hub import HfApi

        try:
            return list(HfApi().list_repo_files(repository))
        except Exception as error:
            raise _translated(error, repository) from error

    def cached(self, repository: str) -> list[str]:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        home = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
        try:
            commit = (home / "refs" / "main").read_text(encoding="utf-8").strip()
        except OSError:
            return []
        snapshot = home / "snapshots" / commit
        # A name in a snapshot is a link to its blob, made when the download is complete.
        return sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())

    def fetch(self, repository: str, files: tuple[str, ...], *, local: bool, progress: Progress | None) -> Path:
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(
                repository,
                allow_patterns=[glob.escape(name) for name in files],
                local_files_only=local,
                tqdm_class=_bar(progress),
            )
        except Exception as error:
            raise _translated(error, repository) from error
        return Path(folder)


def _translated(error: Exception, repository: str) -> FetchError:
    """The library raises errors of its own, of `requests` or of `httpx` (by its version), and of the system: all are
    told by kind, and what is not known to be the repository's fault counts as a network that is not there."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return FetchError(
            "the repository is gated", where=repository, fix="accept its terms on the hub, then `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return FetchError(
            "the hub has no such repository, or it is private",
            where=repository,
            fix="check the name, or `hf auth login`",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnreachableError(
            "HF_HUB_OFFLINE is set and it is not in the cache", where=repository, fix="unset it once"
        )
    first = (str(error).strip().splitlines() or [""])[0]
    return UnreachableError(
        f"the hub cannot be reached: {type(error).__name__}: {first[:200]}",
        where=repository,
        fix="check the network, or, if a path was meant, its spelling",
    )


def _bar(progress: Progress | None) -> Any:
    """A `tqdm` that draws nothing and passes the counts of bytes on. The library makes and updates it from threads."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Others count files, or the same bytes a second time as they pass the wire.
            self._counts = kwargs.get("unit") == "B" and not str(kwargs.pop("name", "")).endswith(".transfer")
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0  # a disabled tqdm does not count
            if progress is not None and self._counts:
                progress("download", int(self.n), int(self.total) if self.total else None)

    return Bar
