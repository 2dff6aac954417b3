"""The thread pool: every unit of every operation runs once, and before any unit of the next one."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from inferflow.kernels import native

from .native_ops import NOTHING, Steps, tensor

SPANS = 400


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_operations_of_few_and_of_many_units_in_turn(threads: int) -> None:
    """A recurrence S ← S + 1 of as many tiny units as there are sequences counts how often each has run. Between two of them
    three units so short that a thread comes too late for them, and must not mistake the next operation's for theirs."""
    isa = native.isas()["portable"]
    ones, state = np.ones((SPANS, 1, 1), np.float32), np.zeros((SPANS, 1, 1, 1), np.float32)
    out, joined = np.empty_like(ones), np.empty(3, np.float32)
    x, decay = tensor(ones), tensor(ones[:, 0])
    count = native.RecurrenceArgs(x, x, x, decay, NOTHING, tensor(out), state.ctypes.data, 1, 1, 1, 1, 0)
    parts = native.array(native.Tensor, [tensor(ones[0, 0], native.NONE)] * 3)
    join = native.ConcatArgs(tensor(joined, native.NONE), 3, parts)
    codes = [native.OPCODES.index(name) for name in ("concat", "recurrence")]
    pair = [native.Op(code, 0, ctypes.addressof(args)) for code, args in zip(codes, (join, count), strict=True)]
    rounds, repeats = 50, 300
    ops = native.array(native.Op, pair * rounds)
    pool, step = native.Pool(threads), Steps([1] * SPANS, [1] * SPANS)
    for n in range(repeats):
        native.run(pool, isa, ops, len(ops), step.struct)
        assert (state == (n + 1) * rounds).all()
