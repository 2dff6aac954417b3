"""A GGUF checkpoint (one file, or all the shards of a split) as a `Source`.

The header is validated by `gguf_header`; weights are dequantised from the mapped file when they are read. Tensors that
only carry rotary factors are part of the config (see `gguf_config`) and are not listed among the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inferflow.weights.files import Bytes, corrupt, map_file
from inferflow.weights.gguf_config import CONSUMED, config_from_gguf
from inferflow.weights.gguf_header import Header, TensorEntry, metadata_only, parse_header
from inferflow.weights.gguf_types import dequantize
from inferflow.weights.shards import missing_shards, shard_set
from inferflow.weights.source import TensorInfo

__all__ = ["GGUFSource"]

# general.type of files that are no models
_NO_MODELS = {
    "adapter": "an adapter (LoRA)",
    "mmproj": "the projector of a model that sees or hears",
    "imatrix": "statistics for quantisation",
}


class GGUFSource:
    """See `Source`. `path` is the file, or any shard of a split (``…-00001-of-00003.gguf``)."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, tuple[Bytes, TensorEntry]] = {}
        self._first, count = self._open_all(path)
        self.metadata: Mapping[str, Any] = self._first[1].metadata
        if not self._entries:
            raise corrupt(path, "holds no tensors (a vocabulary only?)", "give the file with the model's weights")
        kind = self.metadata.get("general.type", "model")
        if kind in _NO_MODELS:
            raise corrupt(path, f"holds {_NO_MODELS[kind]}, not a model", "give the file with the model's weights")
        expected = self.metadata.get("split.tensors.count")
        if count > 1 and type(expected) is int and expected != len(self._entries):
            raise corrupt(path, f"has {len(self._entries)} tensors in its {count} shards and should have {expected}")
        listed = {name: _info(entry) for name, (_, entry) in self._entries.items()}
        self.config: Mapping[str, Any] = config_from_gguf(self.metadata, listed, self.read, str(path))
        self.tensors: Mapping[str, TensorInfo] = {k: v for k, v in listed.items() if k not in CONSUMED}

    def _open_all(self, path: Path) -> tuple[tuple[Bytes, Header], int]:
        """Map and check every shard; the first one and its header (it has the metadata), and the number of shards."""
        header = self._parsed(path)
        count = header[1].metadata.get("split.count", 1)
        if type(count) is not int or count <= 1:
            self._add(path, *header)
            return header, 1
        split = shard_set(path)
        if split is None or len(split[0]) != count:
            name = f"{path.stem[:80]}-00001-of-{count:05d}.gguf"
            raise corrupt(path, f"is one shard of {count}, but its name does not say which", f"name the first {name}")
        paths, number = split
        missing_shards(paths)
        parsed = [header if i == number else self._parsed(shard) for i, shard in enumerate(paths)]
        for i, (shard, (data, head)) in enumerate(zip(paths, parsed, strict=True)):
            if head.metadata.get("split.no", i) != i or head.metadata.get("split.count") != count:
                raise corrupt(
                    shard, f"is not shard {i + 1} of {count} by its own header", f"download {shard.name} again"
                )
            self._add(shard, data, head)
        return parsed[0], count

    @staticmethod
    def _parsed(path: Path) -> tuple[Bytes, Header]:
        data = map_file(path)
        return data, parse_header(data, path)

    def _add(self, path: Path, data: Bytes, header: Header) -> None:
        for entry in header.tensors:
            if entry.name in self._entries:
                raise corrupt(path, f"holds tensor '{entry.name[:80]}', which another shard holds already")
            self._entries[entry.name] = (data, entry)

    def raw(self, name: str) -> Bytes:
        """The stored blocks: uint8 of shape ``(*shape[:-1], bytes per row)``, a read-only view of the mapped file."""
        data, entry = self._entries[name]
        return data[entry.begin : entry.begin + entry.nbytes].reshape(*entry.shape[:-1], -1)

    def read(self, name: str) -> np.ndarray:
        """See `Source.read`."""
        data, entry = self._entries[name]
        return dequantize(data[entry.begin : entry.begin + entry.nbytes], entry.kind, entry.shape)

    def vocabulary(self) -> bytes:
        """A GGUF file of this one's metadata alone (of the first shard), its tokenizer among it."""
        return metadata_only(*self._first)

    def close(self) -> None:
        """Let go of the mapped files; views handed out keep theirs."""
        self._entries, self._first = {}, (np.zeros(0, np.uint8), self._first[1])


def _info(entry: TensorEntry) -> TensorInfo:
    return TensorInfo(entry.name, entry.shape, entry.kind.name, entry.nbytes)
