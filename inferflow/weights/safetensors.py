"""The safetensors format, read by a validator that trusts nothing.

A file is 8 bytes of header length, a JSON header, and the tensors' bytes without gaps. Before any tensor is touched,
the header is proven to describe exactly the rest of the file: lengths, types, shapes, offsets in order, no hole, no
overlap, no trailing byte. Source: https://huggingface.co/docs/safetensors (format section). Tensors stored apart from
their scales are given as one (see `inferflow.weights.scaled`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inferflow.errors import UnsupportedError
from inferflow.weights import scaled
from inferflow.weights.files import Bytes, check_shape, corrupt
from inferflow.weights.shards import open_shards
from inferflow.weights.source import TensorInfo
from inferflow.weights.widen import ITEM_BYTES, widen

__all__ = ["SafetensorsSource", "parse_header"]

_HEADER_LIMIT = 100_000_000
_MAX_COMMAS = 1_500_000  # in the header: a matrix has five or six, and the largest models have some 150,000 tensors


@dataclass(frozen=True)
class _Slot:
    info: TensorInfo
    begin: int  # from the start of the file
    end: int


class SafetensorsSource:
    """One or several safetensors files as a `Source`. `shards` are the files' paths relative to `directory`."""

    format = "safetensors"

    def __init__(
        self,
        directory: Path,
        shards: list[str],
        config: Mapping[str, Any],
        weight_map: Mapping[str, str] | None = None,
        path: Path | None = None,
    ) -> None:
        self.path = path or directory
        self.config = config
        self.metadata: Mapping[str, Any] = {}
        self._bytes, self._slots = open_shards(directory, shards, weight_map, self.path, parse_header)
        self._tile = scaled.tile_of(config)
        stored = {name: slot.info for name, (_, slot) in self._slots.items()}
        self.tensors: Mapping[str, TensorInfo]
        self.tensors, self._scales = scaled.join(stored, self._tile)

    def raw(self, name: str) -> Bytes:
        """The tensor's stored bytes (uint8, 1-D), a read-only view of the mapped file. UnsupportedError where its scales
        are stored apart."""
        if name in self._scales:
            raise UnsupportedError("is stored in two parts", where=f"{self.path}: tensor '{name}'", fix="use read()")
        return self._stored(name)

    def _stored(self, name: str) -> Bytes:
        shard, slot = self._slots[name]
        return self._bytes[shard][slot.begin : slot.end]

    def read(self, name: str) -> np.ndarray:
        """See `Source.read`. Zero copy for F32 and the integers."""
        info = self.tensors[name]
        if name not in self._scales:
            return widen(self._stored(name), info.dtype, info.shape)
        scales = self._slots[self._scales[name]][1].info
        if info.dtype == "MXFP4":
            where = f"{self.path}: tensor '{name}'"
            return scaled.unite_mxfp4(self._stored(name), self._stored(scales.name), info.shape, where)
        values = np.asarray(widen(self._stored(name), info.dtype, info.shape), np.float32)
        factors = np.asarray(widen(self._stored(scales.name), scales.dtype, scales.shape), np.float32)
        return scaled.unite_tiles(values, factors, self._tile)

    def close(self) -> None:
        """Let go of the mapped files; views handed out keep theirs."""
        self._bytes = {}


def parse_header(data: Bytes, where: str | Path) -> dict[str, _Slot]:
    """The tensors of one mapped file, in the file's order, all proven to lie inside it."""
    where = str(where)
    if data.size < 8:
        raise corrupt(where, f"is {data.size} bytes long, too short for a safetensors header")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > _HEADER_LIMIT:
        raise corrupt(where, f"is no safetensors file: its header would be {length} bytes long")
    if length > data.size - 8:
        raise corrupt(where, f"is cut short: the header is {length} bytes long and the file has {data.size - 8} more")
    if length < 2 or data[8] != ord("{"):
        raise corrupt(where, "is no safetensors file: its header does not begin with '{'")
    text = data[8 : 8 + length].tobytes()
    commas = text.count(b",")
    if commas > _MAX_COMMAS:  # parsed, a header takes many times its length in memory
        reason = f"has a header of {commas} entries, more than any model needs ({_MAX_COMMAS} are read)"
        raise corrupt(where, reason, "split it into several files, or download it again")
    header = _parse_json(text, where)
    _check_metadata(header.pop("__metadata__", None), where)
    slots = [_slot(name, entry, 8 + length, where) for name, entry in header.items()]
    slots.sort(key=lambda slot: (slot.begin, slot.end))
    _check_cover(slots, 8 + length, data.size, where)
    return {slot.info.name: slot for slot in slots}


def _parse_json(text: bytes, where: str) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise corrupt(where, f"has a header that is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise corrupt(where, "has a header that is nested too deeply") from None
    except ValueError as error:
        raise corrupt(where, f"has a header that is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(header, dict):
        raise corrupt(where, "has a header that is not a JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key '{twice[:80]}' appears twice")
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _check_metadata(metadata: Any, where: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt(where, "has a '__metadata__' entry that is not a table of strings")


def _slot(name: str, entry: Any, start: int, where: str) -> _Slot:
    at = f"{where}: tensor '{name[:200]}'"
    if not name:
        raise corrupt(where, "has a tensor without a name")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise corrupt(at, "is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        raise corrupt(at, f"has the type {str(dtype)[:40]!r}", f"convert it to one of {known}")
    if not isinstance(shape, list):
        raise corrupt(at, "has a shape that is not a list")
    dims, count = check_shape(shape, at)
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(x) is not int or not 0 <= x < 2**63 for x in offsets)
    ):
        raise corrupt(at, "has data_offsets that are not two non-negative integers")
    begin, end = offsets
    if begin > end:
        raise corrupt(at, f"begins at {begin}, after its end {end}")
    if end - begin != count * ITEM_BYTES[dtype]:
        raise corrupt(
            at, f"of shape {list(dims)} in {dtype} needs {count * ITEM_BYTES[dtype]} bytes and has {end - begin}"
        )
    return _Slot(TensorInfo(name, dims, dtype, end - begin), start + begin, start + end)


def _check_cover(slots: list[_Slot], start: int, size: int, where: str) -> None:
    """The tensors, sorted by offset, must tile the file from `start` to `size`."""
    at = start
    for slot in slots:
        name = slot.info.name[:200]
        if slot.end > size:
            raise corrupt(where, f"is cut short: tensor '{name}' ends at byte {slot.end} of {size}")
        if slot.begin < at:
            raise corrupt(where, f"tensor '{name}' overlaps the one before it")
        if slot.begin > at:
            raise corrupt(where, f"has a hole of {slot.begin - at} bytes before tensor '{name}'")
        at = slot.end
    if at != size:
        raise corrupt(where, f"has {size - at} bytes after its last tensor")
