"""What choosing tokens needs of whole rows of logits: columns' peaks, sums of exponentials, the few logits above a bound.

A row is folded: token ``f * columns + c`` stands at stretch f of column c, so that what is told of a column costs one vector
pass. `Rows` defines the results; `NativeRows` gives the same bits. They are made of IEEE additions and products in one order:
the same on every processor, whatever other rows are there, and on however many threads.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from . import native

__all__ = ["FOLD", "NativeRows", "Rows", "logits_of", "rows_of", "weight"]

Array = np.ndarray

FOLD = 16
LOG2_E = 1.4426950408889634
SMALLEST = np.float32(-125)  # a smaller power of two is 0
ROUND = np.float32(1.5 * 2**23)  # added to a float, it leaves a whole number in the low bits
POWER_OF_TWO = np.asarray(
    [0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0], np.float32
)  # minimax on ±½, to 2e-7


def scale(temperature: Array) -> Array:
    return (LOG2_E / temperature).astype(np.float32)


def weight(x: Array, best: Array, temperature: Array) -> Array:
    """``exp((x - best) / temperature)``, float32, to within 2e-7 of it and the rounding of the exponent; exactly 1 for `best`,
    0 below 2^-125. The arguments are broadcast; `x` and `best` float32."""
    with np.errstate(over="ignore"):  # to -inf
        t = (x - best) * scale(np.asarray(temperature))
    there = t >= SMALLEST
    low = np.where(there, t, SMALLEST)
    big = low + ROUND
    r = low - (big - ROUND)
    p = np.full_like(r, POWER_OF_TWO[0])
    for coefficient in POWER_OF_TWO[1:]:
        p *= r
        p += coefficient
    return np.where(there, (p.view(np.uint32) + (big.view(np.uint32) << np.uint32(23))).view(np.float32), np.float32(0))


def keys_of(logits: Array, ids: Array) -> Array:
    """Integers, uint64, that order by logit, descending, then by id."""
    bits = logits.view(np.uint32)  # floats of one sign compare as their bits do
    order = np.where(bits >> np.uint32(31) == 1, bits, np.uint32(0x7FFFFFFF) - bits)
    return order.astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)


def logits_of(keys: Array) -> Array:
    order = (keys >> np.uint64(32)).astype(np.uint32)
    return np.where(order >> np.uint32(31) == 1, order, np.uint32(0x7FFFFFFF) - order).view(np.float32)


class Rows:
    """Rows `at` [n] of `logits`, float32 [any, vocab]; all of them for None. Nothing is copied."""

    def __init__(self, logits: Array, at: Array | None = None) -> None:
        if logits.dtype != np.float32 or logits.strides[1] != 4:
            logits = np.ascontiguousarray(logits, np.float32)
        self.logits = logits
        self.at = np.arange(len(logits)) if at is None else np.ascontiguousarray(at, np.int64)
        self.vocab = logits.shape[1]
        self.columns = FOLD * -(-self.vocab // FOLD**2)

    def of(self, some: Array) -> Rows:
        return type(self)(self.logits, self.at[some])

    def cells(self, row: Array, column: Array) -> Array:
        """What stands in `column` [n] of `row` [n], float32 [n, FOLD]; -inf past the vocabulary."""
        ids = column[:, None] + self.columns * np.arange(FOLD)
        found = self.logits[self.at[row][:, None], np.minimum(ids, self.vocab - 1)]
        return np.where(ids < self.vocab, found, np.float32(-np.inf))

    def peaks(self) -> tuple[Array, Array, Array]:
        """The greatest of each column, float32 [n, columns]; of each row, float32 [n], NaN where it holds one; and the first
        token that has it, int64 [n] (any where there is a NaN)."""
        peaks = np.empty((len(self.at), self.columns), np.float32)
        tokens = np.empty(len(self.at), np.int64)
        for n, at in enumerate(self.at.tolist()):
            np.fmax.reduce(self._folded(at), axis=0, out=peaks[n])
            tokens[n] = self.logits[at].argmax()
        return peaks, self.logits[self.at, tokens], tokens

    def sums(self, best: Array, temperature: Array) -> Array:
        """The sum of each column's weights, stretch after stretch; float32 [n, columns]."""
        sums = np.zeros((len(self.at), self.columns), np.float32)
        for n, at in enumerate(self.at.tolist()):
            for stretch in weight(self._folded(at), best[n], temperature[n]):
                sums[n] += stretch
        return sums

    def reaching(self, peaks: Array, floor: Array) -> tuple[Array, Array]:
        """The logits that are at least `floor` [n], float32, above -inf: their `keys_of` [n, k], in no order; and how many they
        are, int64 [n]. `peaks` are this object's."""
        row, column = np.divmod(np.flatnonzero(peaks >= floor[:, None]), self.columns)
        cells = self.cells(row, column)
        which, stretch = np.divmod(np.flatnonzero(cells >= floor[row, None]), FOLD)
        row, ids, found = row[which], stretch * self.columns + column[which], cells[which, stretch]
        counts = np.bincount(row, minlength=len(floor))
        keys = np.empty((len(floor), counts.max(initial=0)), np.uint64)
        keys[row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)] = keys_of(found, ids)
        return keys, counts

    def _folded(self, at: int) -> Array:
        folded = np.full(FOLD * self.columns, -np.inf, np.float32)
        folded[: self.vocab] = self.logits[at]
        return folded.reshape(FOLD, -1)


class NativeRows(Rows):
    """The same by the native library: with the instruction set `isa` (None: the best), on the threads of `pool` (None: the
    caller's)."""

    room = 256  # candidates of a row that there is place for at first

    def __init__(
        self, logits: Array, at: Array | None = None, *, isa: str | None = None, pool: native.Pool | None = None
    ) -> None:
        super().__init__(logits, at)
        self.isa = isa
        self.pool = pool or _caller()
        stride = self.logits.strides[0] // 4
        self.struct = native.Rows(
            self.logits.ctypes.data, self.at.ctypes.data, len(self.at), self.vocab, stride, self.columns
        )

    def of(self, some: Array) -> NativeRows:
        return NativeRows(self.logits, self.at[some], isa=self.isa, pool=self.pool)

    def peaks(self) -> tuple[Array, Array, Array]:
        peaks, best = np.empty((len(self.at), self.columns), np.float32), np.empty(len(self.at), np.float32)
        tokens = np.empty(len(self.at), np.int64)
        self._run("peaks", native.PeaksArgs, peaks, best, tokens)
        return peaks, best, tokens

    def sums(self, best: Array, temperature: Array) -> Array:
        sums = np.empty((len(self.at), self.columns), np.float32)
        self._run("weigh", native.WeighArgs, best, scale(temperature), sums)
        return sums

    def reaching(self, peaks: Array, floor: Array) -> tuple[Array, Array]:
        room, counts = self.room, np.empty(len(self.at), np.int64)
        while True:
            keys = np.empty((len(self.at), room), np.uint64)
            self._run("reach", native.ReachArgs, peaks, floor, room, keys, counts)
            most = int(counts.max(initial=0))
            if most <= room:
                return keys[:, :most], counts
            room = most

    def _run(self, name: str, kind: type[ctypes.Structure], *numbers: Array | int) -> None:
        """One operation; its arrays are contiguous."""
        args = kind(self.struct, *(n if isinstance(n, int) else n.ctypes.data for n in numbers))
        ops = native.array(native.Op, [native.Op(native.OPCODES.index(name), 0, ctypes.addressof(args))])
        native.run(self.pool, _number(self.isa), ops, 1, native.Step())


def rows_of(logits: Array, pool: native.Pool | None = None) -> Rows:
    """The rows of `logits`, float32 [rows, vocab], natively where the library was built."""
    return NativeRows(logits, pool=pool) if native.available() else Rows(logits)


@cache
def _caller() -> native.Pool:
    return native.Pool(1)  # which has no state that two callers could share


@cache
def _number(isa: str | None) -> int:
    return native.isas()[native.isa_name(isa)]
