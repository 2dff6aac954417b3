"""Writing a safetensors file tensor by tensor, so that only one is in memory.

Room for the header is kept at the front and filled in at the end (the format lets spaces follow the JSON). Arrays begin at
multiples of 64 bytes without holes, which the format forbids: what is no multiple of 64 bytes long waits and goes last, in
the order of the largest power of two that divides its length, so that each begins at a multiple of that.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SafetensorsWriter"]

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_ENTRY = 200  # bytes of JSON for one tensor beside its name
_TYPES = {
    "float32": "F32",
    "float16": "F16",
    "uint16": "BF16",
    "uint8": "U8",
}  # NumPy lacks bfloat16: its bits are uint16


class SafetensorsWriter:
    """A context manager; the file is whole when it is left without an error. `names` are all that will be added."""

    def __init__(self, path: Path, names: list[str]) -> None:
        room = 1024 + sum(len(json.dumps(name)) + _ENTRY for name in names)
        self.start = -(-(8 + room) // ALIGNMENT) * ALIGNMENT
        self.at = 0  # from the start of the data
        self.entries: dict[str, Any] = {"__metadata__": {"format": "inferflow"}}
        self.late: list[tuple[str, npt.NDArray[Any]]] = []
        self.file = path.open("wb")
        self.file.seek(self.start)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for name, array in sorted(self.late, key=lambda item: -(item[1].nbytes & -item[1].nbytes)):
                    self._write(name, array)
                header = json.dumps(self.entries, separators=(",", ":")).encode()
                assert len(header) <= self.start - 8, "a tensor was added that was not announced"
                self.file.seek(0)
                self.file.write((self.start - 8).to_bytes(8, "little") + header.ljust(self.start - 8))
        finally:
            self.file.close()

    def add(self, name: str, array: npt.NDArray[Any]) -> None:
        """`array`: float32, float16, uint16 (bfloat16's bits) or uint8, C-contiguous."""
        if array.nbytes % ALIGNMENT:
            self.late.append((name, array))
        else:
            self._write(name, array)

    def _write(self, name: str, array: npt.NDArray[Any]) -> None:
        assert name not in self.entries, name
        end = self.at + array.nbytes
        offsets = [self.at, end]
        self.entries[name] = {"dtype": _TYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        self.file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self.at = end
