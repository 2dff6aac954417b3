"""Writing a quantised directory (see `inferflow.weights.quantised`): whole, or not at all.

All is written into a folder beside it, which takes its name at the end by one rename. What is there already is replaced only
when told to, and only if it is such a directory.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, InferflowError
from .config import load_config
from .gguf import GGUFSource
from .output import PREFIX, writing
from .quantised import METHOD, SPEC, VERSION, VOCABULARY, Form, is_quantised
from .safetensors_write import SafetensorsWriter
from .source import Source
from .stored import FLOATS, Stored

__all__ = ["DirectoryWriter", "check_output", "new_directory"]

_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.txt",
)  # fmt: skip


def check_output(out: Path, force: bool) -> None:
    """ArgumentError unless `out` can be made: it is not there, or is a quantised directory that `force` says to replace."""
    where = "-o"
    if not out.name or out.name == "..":
        raise ArgumentError(f"'{out}' is no name for a new directory", where=where, fix="give a name")
    if not out.parent.is_dir():
        raise ArgumentError(f"there is no directory {out.parent}", where=where, fix="make it first")
    if not (out.exists() or out.is_symlink()) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        return
    if not _is_ours(out):
        reason = f"{out} is there already, and is no directory that 'inferflow quantize' made"
        raise ArgumentError(reason, where=where, fix="give another name, or remove it yourself")
    if not force:
        raise ArgumentError(f"{out} is there already", where=where, fix="give another name, or --force")


def _is_ours(out: Path) -> bool:
    """Whether it is a quantised directory, and no link to one."""
    try:
        return out.is_dir() and not out.is_symlink() and is_quantised(load_config(out))
    except InferflowError:  # no config.json that can be read
        return False


@contextmanager
def new_directory(out: Path, force: bool) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when all has gone well, and is gone otherwise. InferflowError where the system does
    not let it be written."""
    check_output(out, force)
    with (
        writing(out),
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=out.parent, ignore_cleanup_errors=True) as staging,
    ):
        made = Path(staging) / "new"
        made.mkdir()
        yield made
        check_output(out, force)
        if out.exists():
            out.rename(Path(staging) / "old")
        made.rename(out)


class DirectoryWriter:
    """Fills `folder`. `keys` are the graph's weights that will be added, each with `add` or `alias`; then `finish`."""

    def __init__(self, folder: Path, keys: list[str]) -> None:
        self.folder = folder
        self.forms: dict[str, Form] = {}
        self.aliases: dict[str, str] = {}
        names = [
            name for key in keys for name in (key, *(f"{key}.{part}" for part in ("codes", "scales", "mins", "rows")))
        ]
        self.file = SafetensorsWriter(folder / "model.safetensors", names)

    def __enter__(self) -> DirectoryWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def add(self, key: str, stored: Stored) -> None:
        """A weight, float or packed."""
        if stored.format in FLOATS:
            self.file.add(key, stored.codes)
            return
        form = self.forms[key] = Form.of(stored)
        arrays = {"codes": stored.codes, "scales": stored.scales, "mins": stored.mins, "rows": stored.row_scales}
        for ending in form.arrays():
            array = arrays[ending]
            assert array is not None
            self.file.add(f"{key}.{ending}", array)

    def alias(self, key: str, other: str) -> None:
        """`key` is the tensor of `other`."""
        self.aliases[key] = other

    def finish(self, source: Source, spec: str, spec_name: str, facts: Mapping[str, Any]) -> None:
        """What stands beside the weights: `spec` is the text of spec.toml, `facts` more entries of the quantization_config."""
        table = {
            "quant_method": METHOD,
            "version": VERSION,
            "spec": spec_name,
            **facts,
            "tensors": {key: form.entry() for key, form in self.forms.items()},
            "aliases": self.aliases,
        }
        config = {**source.config, "quantization_config": table}
        generation = config.pop("generation", None)
        _write_json(self.folder / "config.json", config)
        if isinstance(generation, Mapping):
            _write_json(self.folder / "generation_config.json", generation)
        (self.folder / SPEC).write_text(spec, encoding="utf-8")
        copy_text_files(source, self.folder)


def copy_text_files(source: Source, folder: Path) -> None:
    """The tokenizer: a GGUF file's metadata as they are; else, and for what is beside it, the files that are read or ought to
    go along."""
    if isinstance(source, GGUFSource) and "tokenizer.ggml.tokens" in source.metadata:
        (folder / VOCABULARY).write_bytes(source.vocabulary())
        return
    beside = source.path if source.path.is_dir() else source.path.parent
    for name in _COPIED:
        if (beside / name).is_file():
            shutil.copyfile(beside / name, folder / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
