"""Model files for comparisons: one 16-bit reference, and the same weights in llama.cpp's mixtures.

    python -m tests.bench.models MODEL.gguf [MIX …]      (prints the paths; files that exist are kept)

A quantised file, dequantised, lies on the grid of its own format, and whatever is made from it flatters that format. So
the reference is dithered: noise as wide as each weight's quantisation step is added, once. It is a slightly noisier model
on no format's side.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, ReaderTensor
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from .peer_llama_cpp import quantize_rows
from .peers import Floats

__all__ = ["MIXES", "dither", "quantize"]

# name: what most tensors become, and the file's type number
MIXES = {
    "Q4_0": (Kind.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "IQ4_XS": (Kind.IQ4_XS, LlamaFileType.MOSTLY_IQ4_XS),
    "Q4_K_M": (Kind.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "Q3_K_M": (Kind.Q3_K, LlamaFileType.MOSTLY_Q3_K_M),
    "Q3_K_S": (Kind.Q3_K, LlamaFileType.MOSTLY_Q3_K_S),
}

# where rows are no multiple of a type's block
FALLBACKS = {
    Kind.IQ4_XS: Kind.IQ4_NL,
    Kind.Q3_K: Kind.Q4_0,
    Kind.Q4_K: Kind.Q5_0,
    Kind.Q5_K: Kind.Q5_1,
    Kind.Q6_K: Kind.Q8_0,
}

# the number of steps between a block's least and greatest weight
STEPS = {
    Kind.Q4_0: 15,
    Kind.Q4_1: 15,
    Kind.Q4_K: 15,
    Kind.Q5_0: 31,
    Kind.Q5_1: 31,
    Kind.Q5_K: 31,
    Kind.Q6_K: 63,
    Kind.Q8_0: 255,
}

SLAB = 1 << 24  # weights that are held in float32 at a time
_SKIPPED = ("general.architecture", "general.file_type", "general.quantization_version")

Array = npt.NDArray[Any]


def dither(source: Path, target: Path, seed: int = 0) -> None:
    """Writes `source` with quantised tensors as float16, each weight moved by noise that is uniform over the step between
    the levels of its 32 neighbours; other tensors keep their values."""
    rng = np.random.default_rng(seed)

    def change(tensor: ReaderTensor) -> Array:
        dtype = np.float32 if tensor.tensor_type == Kind.F32 else np.float16
        steps = STEPS.get(tensor.tensor_type)
        return _rows(tensor, lambda rows: (_dithered(rows, steps, rng) if steps else rows).astype(dtype))

    reader = GGUFReader(source)
    kinds = {t.name: Kind.F32 if t.tensor_type == Kind.F32 else Kind.F16 for t in reader.tensors}
    _write(reader, target, LlamaFileType.MOSTLY_F16, kinds, change)


def quantize(source: Path, target: Path, mix: str) -> None:
    """Writes the 16-bit file `source` as llama.cpp's quantiser does without importance data: rounding by its own code,
    the choice of each tensor's type after its rules for dense models with separate attention tensors."""
    reader = GGUFReader(source)
    kinds = _kinds(reader, mix)

    def change(tensor: ReaderTensor) -> Array:
        kind = kinds[tensor.name]
        if kind == tensor.tensor_type:
            return np.asarray(tensor.data)
        return _rows(tensor, lambda rows: quantize_rows(rows, kind))

    _write(reader, target, MIXES[mix][1], kinds, change)


def _dithered(rows: Floats, steps: int, rng: np.random.Generator) -> Floats:
    blocks = rows.reshape(-1, 32)
    step = (blocks.max(1, keepdims=True) - blocks.min(1, keepdims=True)) / np.float32(steps)
    noise = rng.random(blocks.shape, dtype=np.float32) - np.float32(0.5)
    moved: Floats = (blocks + noise * step).reshape(rows.shape)
    return moved


def _rows(tensor: ReaderTensor, change: Callable[[Floats], Array]) -> Array:
    """`change` of the tensor's rows in float32, in their order, a slab at a time."""
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    height = max(1, SLAB // int(tensor.shape[0]))
    slabs = (data[at : at + height] for at in range(0, len(data), height))
    return np.concatenate([change(dequantize(slab, tensor.tensor_type)) for slab in slabs])


def _kinds(reader: GGUFReader, mix: str) -> dict[str, Kind]:
    """What each tensor becomes. Only matrices called ``….weight`` that are no norms change."""
    arch = reader.fields["general.architecture"].contents()
    layers, heads, kv_heads = (
        reader.fields[f"{arch}.{key}"].contents()
        for key in ("block_count", "attention.head_count", "attention.head_count_kv")
    )
    output = "output.weight" if any(t.name == "output.weight" for t in reader.tensors) else "token_embd.weight"
    kinds = {}
    for tensor in reader.tensors:
        kinds[tensor.name] = tensor.tensor_type
        if len(tensor.shape) < 2 or not tensor.name.endswith(".weight") or "_norm" in tensor.name:
            continue
        if tensor.name == output:
            kind = Kind.Q6_K
        else:
            found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
            layer, role = (int(found[1]), found[2]) if found else (0, "")
            kind = _wanted(mix, role, layer, layers, heads // kv_heads)
        fits = int(tensor.shape[0]) % GGML_QUANT_SIZES[kind][0] == 0
        kinds[tensor.name] = kind if fits else FALLBACKS[kind]
    return kinds


def _wanted(mix: str, role: str, layer: int, layers: int, sharing: int) -> Kind:
    """A layer's tensor in a mixture, where `sharing` query heads share one of keys and values."""
    early = layer < layers // 8
    special = early or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    match mix, role:
        case "Q4_K_M", "attn_v" | "ffn_down" if special:
            return Kind.Q6_K
        case "IQ4_XS", "attn_v" if sharing >= 4:
            return Kind.Q5_K
        case "IQ4_XS", "ffn_down" if early:
            return Kind.Q5_K
        case "Q3_K_M", "attn_v":
            return Kind.Q5_K if layer < 2 else Kind.Q4_K
        case "Q3_K_M", "ffn_down":
            return Kind.Q5_K if layer < layers // 16 else Kind.Q4_K
        case "Q3_K_M", "attn_output":
            return Kind.Q4_K
    return MIXES[mix][0]


def _write(
    reader: GGUFReader,
    target: Path,
    file_type: LlamaFileType,
    kinds: dict[str, Kind],
    change: Callable[[ReaderTensor], Array],
) -> None:
    """`target` with the reader's metadata, and its tensors after `change`, in their order; whole, or not at all."""
    part = target.with_name(target.name + ".part")
    writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in _SKIPPED:
            sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    for tensor in reader.tensors:
        block, size = GGML_QUANT_SIZES[kinds[tensor.name]]
        width, *rest = (int(n) for n in tensor.shape)
        shape = [*reversed(rest), width // block * size]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), int(np.prod(shape)), kinds[tensor.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(change(tensor))
    writer.close()
    part.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Makes a dithered 16-bit file and quantised files of it beside a model."
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("mixes", nargs="*", metavar="MIX", help=f"of {', '.join(MIXES)}; all unless given")
    options = parser.parse_args()
    if unknown := set(options.mixes) - set(MIXES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    stem = re.sub(r"(-dithered)?[-.](i?q\d\w*|[bf]*16)$", "", options.model.stem, flags=re.IGNORECASE)
    reference = options.model.with_name(f"{stem}-dithered-f16.gguf")
    if not reference.exists():
        dither(options.model, reference)
    print(reference, flush=True)
    for mix in options.mixes or MIXES:
        target = options.model.with_name(f"{stem}-dithered-{mix.lower()}.gguf")
        if not target.exists():
            quantize(reference, target, mix)
        print(target, flush=True)


if __name__ == "__main__":
    main()
