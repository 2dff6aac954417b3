"""A directory that ``inferflow quantize`` wrote: weights in the engine's own layouts, mapped and used as they are.

``model.safetensors`` holds the graph's weights by key: a float tensor ``layers.0.attn_norm.weight`` by that name, a matrix of
an integer format as ``….codes``, ``….scales`` and ``….rows`` (``quant``'s formats) or ``….mins`` (kept GGUF blocks).
``config.json`` is the model's, with a ``quantization_config``: ``version``, ``tensors`` (format, shape, group and rotation of
each integer matrix) and ``aliases`` (keys that are another key's tensor). ``spec.toml`` is the spec. ``tokenizer.gguf`` holds
the metadata of the GGUF file that the model came from; a model from elsewhere has its own tokenizer files. Everything is
compared with everything before a weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from quant.formats import FORMATS, GROUP

from ..errors import UnsupportedError
from .choice import is_low_bit
from .files import Bytes, corrupt, map_file
from .gguf_header import parse_header
from .safetensors import SafetensorsSource
from .source import TensorInfo
from .stored import Stored
from .tiles import TILE, tiles_of

__all__ = ["METHOD", "SPEC", "VERSION", "VOCABULARY", "Form", "QuantisedSource", "is_quantised"]

METHOD = "inferflow"
VERSION = 1
SPEC = "spec.toml"
VOCABULARY = "tokenizer.gguf"
_AGAIN = "quantise the model again, or fetch the directory again"
_KEPT = ("keep4", "keep7", "keep8")
_KEPT_GROUPS = (16, 32)
_MAX_SIZE = 1 << 40
_MAX_ROTATION = 1 << 20


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to such a directory."""
    table = config.get("quantization_config")
    return isinstance(table, Mapping) and table.get("quant_method") == METHOD


@dataclass(frozen=True)
class Form:
    """An integer matrix by its entry in the table; see `Stored`. `mins`: whether it has minima."""

    format: str
    shape: tuple[int, ...]
    group: int
    rotation: int
    mins: bool

    @staticmethod
    def of(stored: Stored) -> Form:
        return Form(stored.format, stored.shape, stored.group, stored.rotation, stored.mins is not None)

    def entry(self) -> dict[str, Any]:
        """As the table has it: without what goes without saying."""
        out: dict[str, Any] = {"format": self.format, "shape": list(self.shape)}
        if not is_low_bit(self.format):
            out |= {"group": self.group, "mins": self.mins}
        return {**out, "rotation": self.rotation} if self.rotation else out

    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, safetensors' type) of each array, by the ending of its name."""
        *lead, rows, cols = self.shape
        packed = is_low_bit(self.format)
        tiles, groups = tiles_of(rows), -(-cols // self.group)
        width = FORMATS[self.format].group_bytes if packed else self.group * (8 if self.format == "keep4" else 16)
        scales = (*lead, tiles, groups, TILE)
        out = {"codes": ((*lead, tiles, groups, width), "U8"), "scales": (scales, "U8" if packed else "F32")}
        if packed:
            out["rows"] = ((*lead, tiles * TILE), "F32")
        if self.mins:
            out["mins"] = (scales, "F32")
        return out


class QuantisedSource:
    """See `Source`. `packed` are the integer matrices; `tensors` lists them by key, with the graph's shape and the format as
    the dtype. `aliases` maps keys to the key whose tensor they share."""

    format = "inferflow"

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any], path: Path | None = None) -> None:
        self.path = path or directory
        self.config = config
        self.spec_path = directory / SPEC
        self._file = SafetensorsSource(directory, [name], config)
        self._where = str(directory / "config.json")
        table = config["quantization_config"]
        version = table.get("version")
        if type(version) is not int or version != VERSION:
            fix = "upgrade Inferflow" if type(version) is int and version > VERSION else _AGAIN
            self._fail(f"its quantization_config has version {_short(version)}, this Inferflow reads {VERSION}", fix)
        if not self.spec_path.is_file():
            raise corrupt(self.spec_path, "is missing: it says what the model is", _AGAIN)
        self.spec_name = table["spec"] if isinstance(table.get("spec"), str) else "spec"
        self.packed = {key: self._form(key, entry) for key, entry in self._table(table, "tensors").items()}
        plain = dict(self._file.tensors)
        seen = {key: self._prove(key, form, plain) for key, form in self.packed.items()}
        self.tensors: Mapping[str, TensorInfo] = {**seen, **plain}
        self.aliases: dict[str, Any] = self._table(table, "aliases")  # keys to keys
        for key, other in self.aliases.items():
            if not isinstance(other, str) or other not in self.tensors or key in self.tensors:
                self._fail(f"its aliases say that '{_short(key)}' is '{_short(other)}', which cannot be")
        vocabulary = directory / VOCABULARY
        self.metadata: Mapping[str, Any] = {}
        if vocabulary.is_file():
            self.metadata = parse_header(map_file(vocabulary), vocabulary).metadata

    def _fail(self, reason: str, fix: str = _AGAIN) -> NoReturn:
        raise corrupt(self._where, reason, fix)

    def _table(self, table: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = table.get(name, {})
        if not isinstance(value, dict):
            self._fail(f"its quantization_config has '{name}' that is no table")
        return value

    def _form(self, key: str, entry: Any) -> Form:
        """What the table says of a matrix, proved to be possible."""
        at = f"says of '{_short(key)}' that its"
        if not isinstance(entry, dict):
            self._fail(f"{at} form is {_short(entry)}")
        format_, shape, rotation = entry.get("format"), entry.get("shape"), entry.get("rotation", 0)
        group, mins = entry.get("group", GROUP), entry.get("mins", False)
        if not isinstance(format_, str) or not (is_low_bit(format_) or format_ in _KEPT):
            self._fail(f"{at} format is {_short(format_)}", "upgrade Inferflow, or quantise the model again")
        sizes = tuple(shape) if isinstance(shape, list) else ()
        if len(sizes) not in (2, 3) or any(type(n) is not int or not 0 < n < _MAX_SIZE for n in sizes):
            self._fail(f"{at} shape is {_short(shape)}")
        if type(group) is not int or group not in ((GROUP,) if is_low_bit(format_) else _KEPT_GROUPS):
            self._fail(f"{at} groups are {_short(group)} wide")
        if not is_low_bit(format_) and sizes[-1] % group:  # `quant` pads columns, kept blocks are whole
            self._fail(f"{at} shape is {_short(shape)}, whose columns are not whole groups of {group}")
        padded = -(-sizes[-1] // GROUP) * GROUP if is_low_bit(format_) else 1
        if type(rotation) is not int or not _fits(rotation, padded):
            self._fail(f"{at} rotation is {_short(rotation)}")
        if type(mins) is not bool or (mins and is_low_bit(format_)):
            self._fail(f"{at} minima are {_short(mins)}")
        return Form(format_, sizes, group, rotation, mins)

    def _prove(self, key: str, form: Form, plain: dict[str, TensorInfo]) -> TensorInfo:
        """The arrays of a matrix, found to be as its form says; they are taken out of `plain`."""
        size = 0
        for ending, (wanted, dtype) in form.arrays().items():
            info = plain.pop(f"{key}.{ending}", None)
            if info is None or info.shape != wanted or info.dtype != dtype:
                has = "nothing" if info is None else f"{info.dtype} {list(info.shape)}"
                reason = f"'{_short(key)}.{ending}' must be {dtype} {list(wanted)} by config.json, and there is {has}"
                raise corrupt(self.path, reason, _AGAIN)
            size += info.nbytes
        if key in plain:
            raise corrupt(self.path, f"holds '{_short(key)}' twice, packed and plain", _AGAIN)
        return TensorInfo(key, form.shape, form.format, size)

    def stored(self, name: str) -> Stored:
        """Integer matrix `name`: views of the mapped file. CheckpointError for a row's scale that is not finite."""
        form = self.packed[name]
        arrays = {ending: self._array(f"{name}.{ending}", *part) for ending, part in form.arrays().items()}
        if "rows" in arrays:
            self._check_finite(f"{name}.rows", arrays["rows"])
        return Stored(
            form.format, form.shape, arrays["codes"], form.group, form.rotation, arrays["scales"], arrays.get("mins"),
            arrays.get("rows"),
        )  # fmt: skip

    def _array(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        array = self._file.raw(name).view("<f4" if dtype == "F32" else np.uint8).reshape(shape)
        return np.require(array, requirements=["A"])

    def raw(self, name: str) -> Bytes:
        """See `Source.raw`; a packed matrix has no bytes of its own."""
        if name in self.packed:
            raise UnsupportedError("is packed", where=f"{self.path}: '{name}'", fix="use stored() or read()")
        return self._file.raw(name)

    def read(self, name: str) -> np.ndarray:
        """See `Source.read`. CheckpointError for a vector (a norm, a bias) that is not finite."""
        if name in self.packed:
            return self.stored(name).widen()
        array = self._file.read(name)
        if array.ndim == 1:
            self._check_finite(name, array)
        return array

    def _check_finite(self, name: str, array: np.ndarray) -> None:
        """Of small arrays only: to look through all of a model would take longer than to load it."""
        if not np.isfinite(array).all():
            raise corrupt(self.path, f"'{_short(name)}' holds numbers that are not finite", _AGAIN)

    def close(self) -> None:
        self._file.close()


def _fits(rotation: int, padded: int) -> bool:
    return rotation == 0 or (
        2 <= rotation <= _MAX_ROTATION and rotation & (rotation - 1) == 0 and padded % rotation == 0
    )


def _short(value: Any) -> str:
    """Anything a JSON file may hold, short."""
    if isinstance(value, int) and not -(10**18) < value < 10**18:
        return "a huge number"  # whose digits would take long to write
    text = value if isinstance(value, str) else repr(value) if not isinstance(value, dict | list) else json.dumps(value)
    return text[:80]
