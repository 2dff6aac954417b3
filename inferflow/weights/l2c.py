"""The .bin files of karpathy's plain-C inference demos as a `Source`, under the tensor names of the hub.

Three versions: 0 (seven int32, then float32 tensors; no magic number, so the file's size must match exactly), 1 (magic
``ak42``, 256 bytes of header, float32) and 2 (the same header; int8 in groups, each group with a float32 scale after
the tensor's bytes). Query and key rows are stored for rotary embedding of consecutive pairs: ``rope_interleaved`` is
true in the config. There is no tokenizer in the file. Source: the exporter, export.py, of karpathy's repository of the
demo.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from inferflow.errors import UnsupportedError
from inferflow.weights.files import Bytes, corrupt, map_file
from inferflow.weights.source import TensorInfo
from inferflow.weights.widen import widen

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["L2CSource"]

_MAGIC = b"24ka"  # 'ak42' as a little-endian number
_HEADER = 256
_LIMITS = {
    "dim": 1 << 17,
    "hidden": 1 << 20,
    "layers": 1 << 12,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "vocab": 1 << 22,
}


class _Shape(NamedTuple):
    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    tied: bool
    group: int  # of version 2; 0: float32


class _Slot(NamedTuple):
    info: TensorInfo
    begin: int


class L2CSource:
    """See `Source`."""

    format = "l2c"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        version, shape, start = _read_header(self._data, path)
        self._group = shape.group
        self._slots = {}
        at = start
        for name, dims, kind in _layout(version, shape):
            count = int(np.prod(dims, dtype=object))
            nbytes = count + count // shape.group * 4 if kind == "Q8" else 4 * count
            if name:
                self._slots[name] = _Slot(TensorInfo(name, dims, kind, nbytes), at)
            at += nbytes
            if at > self._data.size:
                break
        if at != self._data.size:
            raise corrupt(
                path, f"is no model file of a known format, or cut short: {self._data.size} bytes, {at} expected"
            )
        self.tensors: Mapping[str, TensorInfo] = {name: slot.info for name, slot in self._slots.items()}
        self.metadata: Mapping[str, Any] = {}
        self.config: Mapping[str, Any] = _config(shape)

    def raw(self, name: str) -> Bytes:
        """The float32 bytes (uint8, 1-D). UnsupportedError for version 2, whose scales lie apart from their groups."""
        slot = self._slots[name]
        if slot.info.dtype != "F32":
            raise UnsupportedError("is stored in two parts", where=f"{self.path}: tensor '{name}'", fix="use read()")
        return self._data[slot.begin : slot.begin + slot.info.nbytes]

    def read(self, name: str) -> np.ndarray:
        """See `Source.read`."""
        info, begin = self._slots[name]
        if info.dtype == "F32":
            return widen(self.raw(name), "F32", info.shape)
        count = int(np.prod(info.shape))
        codes = self._data[begin : begin + count].view(np.int8).reshape(-1, self._group)
        scales = self._data[begin + count : begin + info.nbytes].view("<f4")
        with np.errstate(all="ignore"):  # a scale may be infinite or NaN: that is the file's own value
            return np.asarray(codes.astype(np.float32) * scales[:, None]).reshape(info.shape)

    def close(self) -> None:
        """Let go of the mapped file; views handed out keep it."""
        self._slots = {}


def _read_header(data: Bytes, path: Path) -> tuple[int, _Shape, int]:
    """The version, the model's sizes and where its tensors begin; sizes are bounded before anything is made of them."""
    head = data[:_HEADER].tobytes()
    version = 0
    if head.startswith(_MAGIC):
        version = int.from_bytes(head[4:8], "little")
        if version not in (1, 2):
            raise corrupt(path, f"has the unsupported version {version} of its format", "export it as version 1")
    form = "<7i" if version == 0 else "<8x7iBi"
    if len(head) < (_HEADER if version else 28):
        raise corrupt(path, "is no model file of a known format, or cut short")
    values = struct.unpack_from(form, head)
    dim, hidden, layers, heads, kv_heads, vocab, context = values[:7]
    tied = vocab > 0 if version == 0 else values[7] != 0
    group = values[8] if version == 2 else 0
    shape = _Shape(dim, hidden, layers, heads, kv_heads, abs(vocab), context, tied, group)
    if any(not 0 < getattr(shape, name) <= limit for name, limit in _LIMITS.items()) or not 0 < context <= 1 << 24:
        raise corrupt(path, "is no model file of a known format: its sizes make no sense")
    if (
        dim % heads
        or heads % kv_heads
        or (dim // heads) % 2
        or (version == 2 and (group < 1 or dim % group or hidden % group))
    ):
        raise corrupt(path, "is no model file of a known format: its sizes do not divide")
    return version, shape, _HEADER if version else 28


def _layout(version: int, s: _Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of every tensor in the file's order; a name is empty for what is not used."""
    kv = s.dim // s.heads * s.kv_heads
    block = "model.layers.{}."
    kind = "Q8" if version == 2 else "F32"
    embedding = ("model.embed_tokens.weight", (s.vocab, s.dim), kind)
    attn_norm = (block + "input_layernorm.weight", (s.dim,), "F32")
    ffn_norm = (block + "post_attention_layernorm.weight", (s.dim,), "F32")
    final = ("model.norm.weight", (s.dim,), "F32")
    attention = [
        (block + "self_attn.q_proj.weight", (s.dim, s.dim), kind),
        (block + "self_attn.k_proj.weight", (kv, s.dim), kind),
        (block + "self_attn.v_proj.weight", (kv, s.dim), kind),
        (block + "self_attn.o_proj.weight", (s.dim, s.dim), kind),
    ]
    mlp = [
        (block + "mlp.gate_proj.weight", (s.hidden, s.dim), kind),
        (block + "mlp.down_proj.weight", (s.dim, s.hidden), kind),
        (block + "mlp.up_proj.weight", (s.hidden, s.dim), kind),
    ]
    rotary = ("", (2, s.context, s.dim // s.heads // 2), "F32")  # cosines and sines, computed anew
    if version == 0:
        order = [embedding, attn_norm, *attention, ffn_norm, *mlp, final, rotary]
    else:
        order = [attn_norm, ffn_norm, final, embedding, *attention, *mlp]
    for name, dims, dtype in order:
        for layer in range(s.layers if "{}" in name else 1):
            yield name.format(layer), dims, dtype
    if not s.tied:
        yield "lm_head.weight", (s.vocab, s.dim), kind


def _config(s: _Shape) -> dict[str, Any]:
    """The sizes under the hub's names, over what ``[l2c]`` in the specs' formats.toml says of every such file."""
    fixed = tomllib.loads((files("model_specs") / "formats.toml").read_text("utf-8"))["l2c"]
    return {
        **fixed,
        "hidden_size": s.dim,
        "intermediate_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "vocab_size": s.vocab,
        "max_position_embeddings": s.context,
        "tie_word_embeddings": s.tied,
    }
