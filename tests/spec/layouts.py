"""Entries of [tensors] applied to arrays, without a checkpoint: what the loader does, in a few lines."""

from __future__ import annotations

from typing import Any

import numpy as np

from inferflow.spec.document import Leaf, Table, Where, parse_toml
from inferflow.spec.expression import DictScope, evaluate
from inferflow.weights.transform import Transform, map_values, parse_axes

SIZES: dict[str, Any] = {"d": 8, "H": 4, "KV": 2, "hd": 2, "ff": 6, "E": 3, "r": 3, "nope": 2, "vd": 5}


def integer(value: Any) -> int:
    return int(evaluate(value, SIZES)) if isinstance(value, str) else int(value)


def read_entry(text: str) -> tuple[list[str], Table]:
    """(roles, entry) of one line ``role = { … }``."""
    ((key, entry),) = parse_toml(text, "entry").items()
    assert isinstance(entry, Table)
    return [role.strip() for role in key.split(",")], entry


def transform(entry: Table, part: int = 0) -> Transform:
    plain = {key: node.value for key, node in entry.items() if isinstance(node, Leaf)}
    where = Where("entry", 1, 1)
    lhs, rhs = parse_axes(plain["axes"], where) if "axes" in plain else ((), ())
    sizes = tuple(integer(item.value) for item in plain.get("sizes", []))
    known = {k: integer(v) for k, v in plain.items() if k not in ("from", "axes", "split", "sizes", "value", "if")}
    return Transform(lhs, rhs, plain.get("split"), sizes, part, known, plain.get("value"), where, where)


def apply(text: str, array: np.ndarray) -> list[np.ndarray]:
    """What each role of the entry gets of `array`."""
    roles, entry = read_entry(text)
    out = []
    for part in range(len(roles)):
        made = transform(entry, part)
        got = made.apply(array) if made.lhs else array
        if made.lhs:
            assert got.shape == made.shape(array.shape)
        out.append(map_values(made.value, got, DictScope(SIZES), made.where) if made.value else got)
    return out
