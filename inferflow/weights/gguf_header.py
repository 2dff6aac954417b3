"""The header of a GGUF file (versions 2 and 3, little-endian), parsed as hostile input.

Every count and length is compared with the bytes that are left before anything is built from it, so that memory is
bounded by the file's size; offsets are Python integers and cannot wrap. Arrays are not decoded: numbers stay views of
the file, strings are found on access. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, overload

import numpy as np

from inferflow.weights.files import AGAIN, Bytes, corrupt
from inferflow.weights.gguf_types import TYPES, BlockType

__all__ = ["Header", "StringArray", "TensorEntry", "metadata_only", "parse_header"]

_MAX_NAME = 65535
_MAX_DIMS = 4
_MAX_NESTING = 4
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    **{0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"), 4: _U32},
    **{5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<B"), 10: _U64, 11: struct.Struct("<q")},
    12: struct.Struct("<d"),
}
_NUMPY = {
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8"},
}


class TensorEntry(NamedTuple):
    """One tensor: `shape` in NumPy's order, `begin` and `nbytes` in the file."""

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    begin: int
    nbytes: int


class Header(NamedTuple):
    """`metadata` values are int, float, bool, str, a read-only NumPy array, a StringArray, or a tuple of these; `keys` are
    the bytes of the file that they stand in: [begin, end)."""

    version: int
    metadata: dict[str, Any]
    tensors: list[TensorEntry]
    keys: tuple[int, int]


class StringArray(Sequence[str]):
    """An array of strings in a mapped file, decoded on access; bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, data: memoryview, begins: array[int]) -> None:
        self._data = data
        self._begins = begins  # of each string's length field

    def __len__(self) -> int:
        return len(self._begins)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        """All of them at once, which is quick: a string ends where the next one's length field begins."""
        if not self._begins:
            return iter(())
        first, last = self._begins[0], self._begins[-1]
        end = last + 8 + _U64.unpack_from(self._data, last)[0]
        data = bytes(self._data[first:end])
        cuts = [at - first for at in self._begins]
        cuts.append(end - first)
        return iter([data[a + 8 : b].decode("utf-8", "replace") for a, b in pairwise(cuts)])

    def raw(self, index: int) -> bytes:
        """The stored bytes of string `index`."""
        begin = self._begins[index] + 8
        return bytes(self._data[begin : begin + _U64.unpack_from(self._data, begin - 8)[0]])


def parse_header(data: Bytes, where: Path) -> Header:
    """Everything of a mapped GGUF file but the weights; raises CheckpointError for whatever is wrong with it."""
    reader = _Reader(data, str(where))
    version = _check_version(reader)
    n_tensors, n_keys = reader.u64(), reader.u64()
    reader.expect(n_keys, 14, "metadata entries")
    reader.expect(n_tensors, 25, "tensors")
    begin = reader.at
    metadata = _read_metadata(reader, n_keys)
    keys = begin, reader.at
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        reader.fail(f"general.alignment is {str(alignment)[:40]!r}, not a power of two")
    raw = [_read_tensor(reader) for _ in range(n_tensors)]
    start = -(-reader.at // alignment) * alignment
    tensors = [entry._replace(begin=start + entry.begin) for entry in raw]
    _check_layout(tensors, start, alignment, reader)
    return Header(version, metadata, tensors, keys)


def metadata_only(data: Bytes, header: Header) -> bytes:
    """A GGUF file of the same metadata without tensors."""
    begin, end = header.keys
    return b"GGUF" + struct.pack("<IQQ", header.version, 0, len(header.metadata)) + data[begin:end].tobytes()


class _Reader:
    """A cursor over the file that never passes its end."""

    def __init__(self, data: Bytes, where: str) -> None:
        self.array = data
        self.data = data.data
        self.end = data.size
        self.at = 0
        self.where = where

    def fail(self, reason: str, fix: str = AGAIN) -> NoReturn:
        raise corrupt(self.where, reason, fix)

    def expect(self, count: int, size: int, what: str) -> None:
        """`count` things of at least `size` bytes each must fit in what is left."""
        if count * size > self.end - self.at:
            self.fail(f"corrupt GGUF: {count} {what} at byte {self.at} cannot be in a file of {self.end} bytes")

    def number(self, form: struct.Struct) -> Any:
        if form.size > self.end - self.at:
            self.fail(f"corrupt GGUF: the header is cut short at byte {self.end}")
        value = form.unpack_from(self.data, self.at)[0]
        self.at += form.size
        return value

    def u32(self) -> int:
        return int(self.number(_U32))

    def u64(self) -> int:
        return int(self.number(_U64))

    def text(self) -> bytes:
        length = self.u64()
        self.expect(length, 1, "bytes of a string")
        self.at += length
        return bytes(self.data[self.at - length : self.at])

    def name(self, what: str) -> str:
        """A key or a tensor's name: not empty, at most 65535 bytes, UTF-8."""
        at = self.at
        value = self.text()
        if not 0 < len(value) <= _MAX_NAME:
            self.fail(f"corrupt GGUF: {what} at byte {at} is {len(value)} bytes long")
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"corrupt GGUF: {what} at byte {at} is not UTF-8")


def _check_version(reader: _Reader) -> int:
    magic = bytes(reader.data[:4])
    if magic == b"FUGG":
        reader.fail("this is a big-endian GGUF file", "convert the model on, or for, a little-endian machine")
    if magic != b"GGUF":
        reader.fail(f"is no GGUF file: it begins with {magic!r}")
    reader.at = 4
    version = reader.u32()
    if version and version & 0xFFFF == 0:
        reader.fail("this is a big-endian GGUF file", "convert the model on, or for, a little-endian machine")
    if version not in (2, 3):
        reader.fail(f"unsupported version {version} of GGUF; 2 and 3 are read", "convert the model again")
    return version


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = reader.name("a metadata key")
        if key in metadata:
            reader.fail(f"corrupt GGUF: metadata key '{key[:80]}' appears twice")
        metadata[key] = _read_value(reader, reader.u32(), key)
    return metadata


def _read_value(reader: _Reader, kind: int, key: str) -> Any:
    if kind == _STRING:
        return reader.text().decode("utf-8", "replace")
    if kind == _ARRAY:
        return _read_array(reader, key, 1)
    form = _SCALARS.get(kind)
    if form is None:
        reader.fail(f"corrupt GGUF: metadata key '{key[:80]}' has the unknown type {kind}")
    value = reader.number(form)
    return bool(value) if kind == _BOOL else value


def _read_array(reader: _Reader, key: str, depth: int) -> Any:
    if depth > _MAX_NESTING:
        reader.fail(f"corrupt GGUF: metadata key '{key[:80]}' nests arrays more than {_MAX_NESTING} deep")
    kind, count = reader.u32(), reader.u64()
    what = f"elements of metadata key '{key[:80]}'"
    if kind == _STRING:
        reader.expect(count, 8, what)
        return _read_strings(reader, count)
    if kind == _ARRAY:
        reader.expect(count, 12, what)
        return tuple(_read_array(reader, key, depth + 1) for _ in range(count))
    if kind not in _NUMPY:
        reader.fail(f"corrupt GGUF: metadata key '{key[:80]}' is an array of the unknown type {kind}")
    dtype = np.dtype(_NUMPY[kind])
    reader.expect(count, dtype.itemsize, what)
    begin = reader.at
    reader.at += count * dtype.itemsize
    values = reader.array[begin : reader.at].view(dtype)
    return values != 0 if kind == _BOOL else values


def _read_strings(reader: _Reader, count: int) -> StringArray:
    """Walk over `count` strings, keeping only where each begins. A vocabulary has 10**5 of them: the loop is tight."""
    begins = array("Q", bytes(8 * count))
    data, at, size = reader.data, reader.at, _U64.unpack_from
    try:
        for i in range(count):
            begins[i] = at
            at += 8 + size(data, at)[0]
    except (struct.error, OverflowError, IndexError):
        at = reader.end + 1
    if at > reader.end:
        reader.fail(f"corrupt GGUF: a string in an array of {count} runs past the end of the file")
    reader.at = at
    return StringArray(data, begins)


def _read_tensor(reader: _Reader) -> TensorEntry:
    """One entry of the tensor table; its `begin` is still relative to the data section."""
    name = reader.name("a tensor's name")
    at = f"corrupt GGUF: tensor '{name[:80]}'"
    n_dims = reader.u32()
    if not 1 <= n_dims <= _MAX_DIMS:
        reader.fail(f"{at} has {n_dims} dimensions; 1 to {_MAX_DIMS} are possible")
    dims = [reader.u64() for _ in range(n_dims)]
    kind_id, offset = reader.u32(), reader.u64()
    kind = TYPES.get(kind_id)
    if kind is None:
        reader.fail(f"{at} has the unknown type {kind_id}", "convert the model to a current type, such as Q4_K or Q8_0")
    if not kind.served:
        reader.fail(
            f"tensor '{name[:80]}' has type {kind.name}, which is not served", "convert the model to Q4_K or Q8_0"
        )
    if dims[0] % kind.weights:
        reader.fail(f"{at} has rows of {dims[0]} weights, not a multiple of {kind.name}'s block of {kind.weights}")
    count = 1
    for dim in dims:
        count *= dim
        if not dim > 0 or count > 2**62:
            reader.fail(f"{at} has the impossible shape {dims}")
    return TensorEntry(name, tuple(reversed(dims)), kind, offset, count // kind.weights * kind.nbytes)


def _check_layout(tensors: list[TensorEntry], start: int, alignment: int, reader: _Reader) -> None:
    """Names are unique; tensors are aligned, inside the file, apart from each other, and nothing follows the last."""
    if len({entry.name for entry in tensors}) != len(tensors):
        seen: set[str] = set()
        for entry in tensors:
            if entry.name in seen:
                reader.fail(f"corrupt GGUF: tensor '{entry.name[:80]}' appears twice")
            seen.add(entry.name)
    at = start
    for entry in sorted(tensors, key=lambda entry: entry.begin):
        name = entry.name[:80]
        if (entry.begin - start) % alignment:
            reader.fail(f"corrupt GGUF: tensor '{name}' is not aligned to {alignment} bytes")
        if entry.begin < at:
            reader.fail(f"corrupt GGUF: tensor '{name}' overlaps the one before it")
        at = entry.begin + entry.nbytes
        if at > reader.end:
            reader.fail(f"is cut short: tensor '{name}' ends at byte {at}, the file at {reader.end}")
    if tensors and reader.end - at >= max(alignment, 32):
        reader.fail(f"has {reader.end - at} bytes after its last tensor")
