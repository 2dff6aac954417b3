"""Quantisation of weight matrices to 3, 3.5, 4 and 8 bits: formats, codebooks, packing, rotation, calibration.

Knows arrays only, no model. `quantise` turns float weights into a `Packed` matrix in the engine's layout, `dequantise` gives
the weights that it stands for. What a user got wrong is a ValueError of one sentence.
"""

from .formats import FORMATS, Format, find_format
from .packing import Packed, bits_per_weight, unpack
from .quantise import dequantise, quantise
from .rotation import hadamard, widest_rotation

__all__ = [
    "FORMATS",
    "Format",
    "Packed",
    "bits_per_weight",
    "dequantise",
    "find_format",
    "hadamard",
    "quantise",
    "unpack",
    "widest_rotation",
]
