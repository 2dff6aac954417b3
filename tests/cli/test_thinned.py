"""Long texts: what is measured or calibrated on a part is that of the whole."""

from __future__ import annotations

import itertools

from inferflow.cli.quantize import PARTS, thinned


def test_a_short_text_is_all_there() -> None:
    assert thinned("abc" * 100, 300) == "abc" * 100


def test_a_long_one_gives_evenly_spread_parts() -> None:
    text = "".join(f"{n:08d}" for n in range(100_000))
    parts = thinned(text, PARTS * 80).split("\n")
    assert len(parts) == PARTS
    assert {len(part) for part in parts} == {80}
    assert (parts[0], parts[-1]) == (text[:80], text[-80:])
    starts = [text.index(part) for part in parts]
    assert max(b - a for a, b in itertools.pairwise(starts)) < 2 * len(text) / PARTS
