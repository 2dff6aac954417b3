"""What a program's operations point at and no step changes: weight matrices in the native library's structs, rotary tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from quant.codebooks import CODEBOOKS

from ..graph.fuse import Layout
from ..graph.graph import Weight
from ..kernels import native
from ..kernels.rope import frequencies, rope_length
from ..weights.stored import FLOATS, Stored

__all__ = ["Matrices", "Parameters", "Rope"]


class Parameters(Protocol):
    """Where weights come from (`inferflow.weights.reader.Weights`)."""

    def array(self, key: str) -> np.ndarray: ...
    def stored(self, key: str) -> Stored: ...


class Matrices:
    """Weights as structs. The arrays they point at are appended to `owned`, which must live as long."""

    def __init__(self, weights: Parameters, owned: list[Any]) -> None:
        self.weights = weights
        self.owned = owned
        self.made: dict[str, native.Matrix] = {}

    def layout(self, weight: Weight) -> Layout | None:
        """How the inputs of this matrix are quantised; None for floats."""
        stored = self.weights.stored(weight.key)
        return None if stored.format in FLOATS else (stored.group, stored.rotation)

    def matrix(self, weight: Weight, bias: Weight | None = None) -> native.Matrix:
        if weight.key not in self.made:
            self.made[weight.key] = self._make(self.weights.stored(weight.key), bias)
        return self.made[weight.key]

    def floats(self, array: np.ndarray) -> int:
        """The address of `array` as float32."""
        array = np.ascontiguousarray(array, np.float32)
        self.owned.append(array)
        return int(array.ctypes.data)

    def _make(self, stored: Stored, bias: Weight | None) -> native.Matrix:
        *lead, rows, cols = stored.shape
        stack = math.prod(lead)
        padded = -(-cols // stored.group) * stored.group if stored.group else cols
        made = native.Matrix(
            native.FORMATS.index(stored.format), stored.group, rows, cols, padded, stack, stored.rotation
        )
        arrays = {"codes": stored.codes, "scales": stored.scales, "mins": stored.mins, "row_scales": stored.row_scales}
        for name, array in arrays.items():
            if array is not None:
                self.owned.append(array)
                setattr(made, name, array.ctypes.data)
        made.codes_stride = stored.codes.nbytes // stack
        made.scales_stride = 0 if stored.scales is None else stored.scales.size // stack
        made.rows_stride = 0 if stored.row_scales is None else stored.row_scales.size // stack
        if bias is not None:
            made.bias = self.floats(self.weights.array(bias.key))
        if stored.format in CODEBOOKS:
            table = np.ascontiguousarray(CODEBOOKS[stored.format], np.uint8)
            self.owned.append(table)
            made.codebook = table.ctypes.data
        return made


@dataclass
class Rope:
    """One kind of rotary positions. The table operation's inverse frequencies are chosen by each sequence's length."""

    params: Mapping[str, Any]
    args: native.RopeTableArgs = field(default_factory=native.RopeTableArgs)
    cache: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.half = len(frequencies(self.params, 1)[0])
        self.args.half = self.half
        self.variant_of = np.empty(0, np.int32)  # of each sequence: its table

    @property
    def varies(self) -> bool:
        return self.params["kind"] in ("longrope", "dynamic")

    def prepare(self, lengths: Sequence[int]) -> None:
        """Point the operation at the tables of sequences that may reach `lengths` tokens."""
        keys = [rope_length(self.params, length) for length in lengths] if self.varies else None
        if keys is None and len(lengths) <= len(self.variant_of):
            return  # one table for all, as before
        by_key = dict(zip(keys, lengths, strict=True)) if keys else {0: 1}
        variants = tuple(sorted(by_key))
        if variants not in self.cache:
            made = [frequencies(self.params, by_key[key]) for key in variants]
            sign = -1 if self.params["reverse"] else 1
            inverse = np.ascontiguousarray([sign * f for f, _ in made], np.float32)
            self.cache[variants] = inverse, np.asarray([factor for _, factor in made], np.float32)
        inverse, factors = self.cache[variants]
        which = [variants.index(key) for key in keys] if keys else [0] * (2 * len(lengths))
        self.variant_of = np.asarray(which, np.int32)
        for name, array in zip(("inverse", "factors", "variant_of"), (inverse, factors, self.variant_of), strict=True):
            setattr(self.args, name, array.ctypes.data)
