"""The tensor types of GGUF: sizes of their blocks, and dequantisation to float32.

The table is the format's (ggml.h, `ggml_type`; the type traits of ggml.c). Plain types are decoded here; block types go
through `gguf.quants`, whose formulas define them, a slab of blocks at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from inferflow.errors import UnsupportedError
from inferflow.weights.files import Bytes
from inferflow.weights.widen import ITEM_BYTES, widen

__all__ = ["TYPES", "BlockType", "dequantize"]


class BlockType(NamedTuple):
    """A type: `weights` values in `nbytes` bytes. Types that are not `served` cannot be read."""

    name: str
    weights: int
    nbytes: int
    served: bool = True


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40, served=False),  # 8 and 15 exist for activations only
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292, served=False),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18, served=False),
}

_SLAB = 1 << 17  # weights dequantised at a time: temporaries stay in the cache, which is twice as fast


def dequantize(data: Bytes, kind: BlockType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """`data` (uint8, exactly the tensor's bytes) as an array of `shape`: float32, or the integers that are stored.

    Raises UnsupportedError for a type that has no dequantiser here.
    """
    if kind.name in ITEM_BYTES:
        return widen(data, kind.name, shape)
    quant = _quant_class(kind.name)
    blocks = data.reshape(-1, kind.nbytes)
    out = np.empty((len(blocks), kind.weights), np.float32)
    step = max(1, _SLAB // kind.weights)
    with np.errstate(all="ignore"):  # a scale may be infinite or NaN: that is the file's own value
        for start in range(0, len(blocks), step):
            out[start : start + step] = quant.dequantize_blocks(blocks[start : start + step])
    return out.reshape(shape)


@cache
def _quant_class(name: str) -> Any:
    quant = getattr(_quants(), name, None)
    if quant is None:
        raise UnsupportedError(
            f"tensors of type {name} cannot be read", where="GGUF", fix="convert the model to Q8_0, Q4_K or F16"
        )
    quant.init_grid()
    return quant


@cache
def _quants() -> types.ModuleType:
    """The module `gguf.quants`, without the rest of its package.

    ``import gguf`` also loads tokenizers and YAML (80 ms, a tenth of a start); its `quants` needs two small siblings
    only. So it is loaded below an alias package that has the same folder and an empty ``__init__``.
    """
    if "gguf.quants" in sys.modules:
        return sys.modules["gguf.quants"]
    spec = importlib.util.find_spec("gguf")
    if spec is None or spec.submodule_search_locations is None:
        raise UnsupportedError("the Python package 'gguf' is not installed", where="GGUF", fix="pip install gguf")
    alias = "_inferflow_gguf"
    package = types.ModuleType(alias)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules.setdefault(alias, package)
    return importlib.import_module(f"{alias}.quants")
