"""The table of parity: one row a model variant, in files by line of descent. Adding a family is adding a row."""

from __future__ import annotations

import importlib
import pkgutil

from .row import Row

__all__ = ["ROWS", "Row"]


def _collect() -> list[Row]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "row")
    return [row for name in names for row in importlib.import_module(f"{__name__}.{name}").ROWS]


ROWS = _collect()
