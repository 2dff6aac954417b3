"""A torch checkpoint (``pytorch_model.bin`` and its shards) as a `Source`, executing nothing and without torch.

`torch.save` writes a zip archive, uncompressed: ``data.pkl`` describes the tensors (see `torch_pickle`) and
``data/<key>`` are their storages. The storages are mapped in place; every tensor's offset, shape and strides are
proven to stay inside its storage when the file is opened. Compressed members, which torch does not write, are refused:
they could hide any size.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from inferflow.weights.files import AGAIN, Bytes, check_shape, corrupt
from inferflow.weights.shards import open_shards
from inferflow.weights.source import TensorInfo
from inferflow.weights.torch_pickle import TensorRecord, describe
from inferflow.weights.widen import ITEM_BYTES, widen

__all__ = ["TorchSource"]

_PICKLE_LIMIT = 16 << 20
_MEMBER_LIMIT = 1_000_000
_WRAPPERS = ("state_dict", "model", "module", "model_state_dict")
_LOCAL_HEADER = 30
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, OSError, ValueError, NotImplementedError),
    *(OverflowError, IndexError, EOFError, RuntimeError, struct.error),
)


class _Slot(NamedTuple):
    info: TensorInfo
    begin: int  # of its first element, from the start of the file
    stride: tuple[int, ...]  # in bytes
    contiguous: bool


class TorchSource:
    """See `Source`. `shards` are paths relative to `directory`."""

    format = "torch"

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
        self._bytes, self._slots = open_shards(directory, shards, weight_map, self.path, _read_archive)
        self.tensors: Mapping[str, TensorInfo] = {name: slot.info for name, (_, slot) in self._slots.items()}

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes in row-major order (uint8, 1-D): a view of the mapped file, or a copy of a strided
        tensor."""
        shard, slot = self._slots[name]
        data, info = self._bytes[shard], slot.info
        if slot.contiguous:
            return data[slot.begin : slot.begin + info.nbytes]
        item = ITEM_BYTES[info.dtype]
        span = item + sum((n - 1) * s for n, s in zip(info.shape, slot.stride, strict=True))
        window = data[slot.begin : slot.begin + span]
        view = np.lib.stride_tricks.as_strided(window, (*info.shape, item), (*slot.stride, 1), writeable=False)
        return np.ascontiguousarray(view).reshape(-1)

    def read(self, name: str) -> np.ndarray:
        """See `Source.read`."""
        info = self.tensors[name]
        return widen(self.raw(name), info.dtype, info.shape)

    def close(self) -> None:
        """Let go of the mapped files; views handed out keep theirs."""
        self._bytes = {}


def _read_archive(data: Bytes, path: Path) -> dict[str, _Slot]:
    members = _members(path)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1 or any("/code/" in name for name in members):
        raise corrupt(
            path, "is a zip archive, but not one of weights that torch.save wrote", "convert it to safetensors"
        )
    root = pickles[0].removesuffix("data.pkl")
    order = members.get(root + "byteorder")
    if order is not None and _extent(data, order, path, 16) != b"little":
        raise corrupt(path, "was written on a big-endian machine", "convert it to safetensors")
    storages = {name.removeprefix(root + "data/"): m for name, m in members.items() if name.startswith(root + "data/")}
    pickle = _extent(data, members[pickles[0]], path, _PICKLE_LIMIT)
    records = _state_dict(describe(pickle, str(path)), path)
    return {name: _slot(name, record, storages, data, path) for name, record in records.items()}


def _members(path: Path) -> dict[str, zipfile.ZipInfo]:
    """The archive's directory; every member is stored uncompressed, and no name appears twice."""
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.infolist()
    except _ZIP_ERRORS as error:
        raise corrupt(path, f"is no intact zip archive: {str(error)[:100]}") from None
    members = {member.filename: member for member in listed}
    if len(members) != len(listed) or len(listed) > _MEMBER_LIMIT:
        raise corrupt(path, "is an archive with a name twice or too many names", "convert the model to safetensors")
    for member in listed:
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise corrupt(
                path,
                f"has the compressed member '{member.filename[:80]}', which torch does not write",
                "convert the model to safetensors",
            )
    return members


def _begin(data: Bytes, member: zipfile.ZipInfo, path: Path) -> int:
    """Where a member's bytes begin, by its local header; all of them are inside the file."""
    at = member.header_offset
    head = data[at : at + _LOCAL_HEADER].tobytes() if 0 <= at <= data.size - _LOCAL_HEADER else b""
    if head[:4] != b"PK\x03\x04":
        raise corrupt(path, f"has no member '{member.filename[:80]}' where its directory says")
    begin = at + _LOCAL_HEADER + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    if begin + member.file_size > data.size:
        raise corrupt(path, f"is cut short: member '{member.filename[:80]}' passes the end of the file")
    return begin


def _extent(data: Bytes, member: zipfile.ZipInfo, path: Path, limit: int) -> bytes:
    if member.file_size > limit:
        raise corrupt(
            path, f"has a member '{member.filename[:80]}' of {member.file_size} bytes; at most {limit} are read"
        )
    begin = _begin(data, member, path)
    return data[begin : begin + member.file_size].tobytes()


def _state_dict(root: Any, path: Path) -> dict[str, TensorRecord]:
    """The tensors by name; a dict that wraps the state dict, as trainers write it, is opened."""
    if isinstance(root, dict) and not any(isinstance(value, TensorRecord) for value in root.values()):
        root = next((root[key] for key in _WRAPPERS if isinstance(root.get(key), dict)), root)
    if not isinstance(root, dict):
        raise corrupt(path, "is no dict of tensors", "save the model's state_dict, or convert it to safetensors")
    return {name: value for name, value in root.items() if isinstance(name, str) and isinstance(value, TensorRecord)}


def _slot(name: str, record: TensorRecord, storages: dict[str, zipfile.ZipInfo], data: Bytes, path: Path) -> _Slot:
    at = f"{path}: tensor '{name[:200]}'"
    member = storages.get(record.storage.key)
    if member is None:
        raise corrupt(at, f"refers to storage '{record.storage.key[:80]}', which the archive does not hold")
    if record.dtype is None or not isinstance(record.shape, tuple) or not isinstance(record.stride, tuple):
        raise corrupt(at, "has no proper type, shape or strides", "convert the model to safetensors")
    shape, count = check_shape(record.shape, at)
    item = ITEM_BYTES[record.dtype]
    held = record.storage.numel * (1 if record.storage.dtype is None else item)
    if held > member.file_size:
        raise corrupt(at, f"needs a storage of {held} bytes and the archive holds {member.file_size}")
    stride, offset = record.stride, record.offset
    if len(stride) != len(shape) or any(type(x) is not int or not 0 <= x < 2**62 for x in (*stride, offset)):
        raise corrupt(at, "has strides or an offset that are no proper numbers")
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if count and (last + 1) * item > held:
        raise corrupt(at, f"reaches byte {(last + 1) * item} of a storage of {held} bytes")
    if count * item > held and count:
        raise corrupt(at, "repeats its elements by overlapping strides", f"save it with .contiguous(), or {AGAIN}")
    begin = _begin(data, member, path) + (offset * item if count else 0)
    info = TensorInfo(name, shape, record.dtype, count * item)
    return _Slot(info, begin, tuple(s * item for s in stride), count == 0 or _contiguous(shape, stride))


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return all(n == 1 or s == e for n, s, e in zip(shape, stride, expected, strict=True))
