"""Checkpoint files built byte by byte, so that every field can be wrong."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

U32, STRING, ARRAY, U64 = 4, 8, 9, 10


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """`header` is JSON text, bytes, or what `json.dumps` takes; `length` replaces its true length."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def kv(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str | bytes, dims: Sequence[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return (
        text(name) + struct.pack("<I", count) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
    )


ARCH = kv("general.architecture", STRING, text("tiny"))


def gguf(
    kvs: Sequence[bytes] = (ARCH,),
    tensors: Sequence[bytes] = (tensor("a.weight", [8, 2]),),
    data: bytes = bytes(64),
    *,
    version: int = 3,
    n_kv: int | None = None,
    n_tensors: int | None = None,
    magic: bytes = b"GGUF",
    alignment: int = 32,
) -> bytes:
    """A GGUF file; counts and version may be false. By default: one 2x8 F32 tensor of zeros."""
    head = magic + struct.pack("<I", version)
    head += struct.pack("<QQ", len(tensors) if n_tensors is None else n_tensors, len(kvs) if n_kv is None else n_kv)
    head += b"".join(kvs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def torch_zip(pickled: bytes, storages: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive as torch.save lays it out."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr("model/data.pkl", pickled)
        archive.writestr("model/byteorder", "little")
        for key, data in storages.items():
            archive.writestr(f"model/data/{key}", data)
        archive.writestr("model/version", "3\n")
    return out.getvalue()


class Touch:
    """Unpickled by `pickle`, it would create the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def state_pickle(
    numel: Any = 6,
    offset: Any = 0,
    shape: Any = (2, 3),
    stride: Any = (3, 1),
    key: str = "0",
    storage: str = "FloatStorage",
) -> bytes:
    """The pickle of ``{"w": tensor}`` as torch writes it, with any numbers."""

    def value(item: Any) -> bytes:
        return pickle.dumps(item, 2)[2:-1]

    tensor_args = value("storage") + f"ctorch\n{storage}\n".encode() + value(key) + value("cpu") + value(numel)
    body = b"ctorch._utils\n_rebuild_tensor_v2\n((" + tensor_args + b"tQ" + value(offset) + value(shape) + value(stride)
    return b"\x80\x02}" + value("w") + body + b"\x89ccollections\nOrderedDict\n)RtRs."


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path
