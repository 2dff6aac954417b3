"""The formats that a weight matrix can be stored in, and the sizes of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ALIASES", "FORMATS", "GROUP", "TILE", "Format", "find_format"]

TILE = 16  # rows that are stored together
GROUP = 64  # columns that share a scale


@dataclass(frozen=True)
class Format:
    """One way to store weights. `bits` are those of a weight's own code, without scales.

    kind "float": row-major, as in a file. "pair": one code of 2·bits bits names two weights, by two signs and the index of
    a point in the quadrant's codebook. "integer": int8. `planes`: the bit planes of a pair code beside its nibbles.
    """

    name: str
    kind: str
    bits: float

    @property
    def planes(self) -> int:
        return round(2 * self.bits) - 4 if self.kind == "pair" else 0

    @property
    def points(self) -> int:
        """Entries of the quadrant's codebook (pair codes)."""
        return 2 ** round(2 * self.bits - 2) if self.kind == "pair" else 0

    @property
    def group_bytes(self) -> int:
        """Bytes of one group of one tile: 16 rows of 64 columns. 0 for float formats."""
        return 0 if self.kind == "float" else round(self.bits * TILE * GROUP / 8)


FORMATS: Mapping[str, Format] = {
    form.name: form
    for form in (
        Format("q3", "pair", 3),
        Format("q3.5", "pair", 3.5),
        Format("q4", "pair", 4),
        Format("q8", "integer", 8),
        Format("f16", "float", 16),
        Format("bf16", "float", 16),
        Format("f32", "float", 32),
    )
}
ALIASES: Mapping[str, str] = {"q3h": "q3.5"}


def find_format(name: str) -> Format:
    """The format of that name or alias. ValueError lists the names."""
    form = FORMATS.get(ALIASES.get(name, name))
    if form is None:
        raise ValueError(f"no format is called {name!r}: there are {', '.join([*FORMATS, *ALIASES])}")
    return form
