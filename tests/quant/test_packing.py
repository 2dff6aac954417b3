"""The byte layout, spelled out weight by weight as the engine's contract words it, and golden bytes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from quant import FORMATS, Packed, bits_per_weight, dequantise, find_format, unpack
from quant.codebooks import CODEBOOKS
from quant.packing import X_NEGATIVE, Y_NEGATIVE, pack_integers, pack_pairs, unpack_integers, unpack_pairs

PAIRS = ["q3", "q3.5", "q4"]
GOLDEN = {
    "q3": "fc55fea958ab360c",
    "q3.5": "dff9cb719225c95b",
    "q4": "b30c46d462638ede",
    "q8": "f26e855478516d5e",
}


def filled(name: str, rows: int = 40, cols: int = 150, lead: tuple[int, ...] = ()) -> Packed:
    """A packed matrix of arbitrary bytes, made without a random generator, so that it is the same for ever."""
    tiles, groups = -(-rows // 16), -(-cols // 64)
    size = find_format(name).group_bytes
    count = int(np.prod((*lead, tiles, groups)))
    noise = np.arange(count * (size + 16), dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(13)
    noise = noise.astype(np.uint8)
    codes, scales = noise[: count * size], noise[count * size :]
    row_scales = np.linspace(0.001, 0.002, int(np.prod(lead)) * tiles * 16, dtype=np.float32)
    return Packed(
        name,
        rows,
        cols,
        0,
        codes.reshape(*lead, tiles, groups, size),
        scales.reshape(*lead, tiles, groups, 16),
        row_scales.reshape(*lead, tiles * 16),
    )


def value_by_the_book(packed: Packed, row: int, column: int) -> int:
    """One weight's integer, read bit by bit."""
    block = packed.codes[row // 16, column // 64]
    step, within = column % 64 // 8, column % 8
    lane, second = row % 16 * 4 + within % 4, within >= 4
    if packed.format == "q8":
        return int(block[column % 64 // 4 * 64 + row % 16 * 4 + column % 4].view(np.int8))
    nibbles = int(block[step // 2 * 64 + lane])
    index = nibbles >> 4 if step % 2 else nibbles & 15
    bits = [int(block[256 + 64 * plane + lane]) >> step & 1 for plane in range(find_format(packed.format).planes)]
    index += sum(bit << (4 + n) for n, bit in enumerate(bits[2:]))
    magnitude = int(CODEBOOKS[packed.format][int(second), index])
    return -magnitude if bits[int(second)] else magnitude


@pytest.mark.parametrize("name", [*PAIRS, "q8"])
def test_every_weight_is_where_the_contract_says(name: str) -> None:
    packed = filled(name)
    values = unpack(packed)
    assert values.shape == (40, 192)
    for row in range(40):
        for column in range(192):
            assert values[row, column] == value_by_the_book(packed, row, column)


@pytest.mark.parametrize("name", [*PAIRS, "q8"])
def test_golden_values(name: str) -> None:
    """What stored files mean may never change: neither the layout nor a codebook."""
    assert hashlib.sha256(unpack(filled(name)).tobytes()).hexdigest()[:16] == GOLDEN[name]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_round_trip(name: str) -> None:
    form = find_format(name)
    rng = np.random.default_rng(1)
    signs = rng.choice([0, X_NEGATIVE, Y_NEGATIVE, X_NEGATIVE + Y_NEGATIVE], (3, 5, 32, 16))
    codes: NDArray[np.uint8] = (rng.integers(0, form.points, (3, 5, 32, 16)) + signs).astype(np.uint8)
    packed = pack_pairs(codes, form)
    assert packed.shape == (3, 5, form.group_bytes)
    assert (unpack_pairs(packed, form) == codes).all()


def test_integers_round_trip() -> None:
    values = np.random.default_rng(1).integers(-128, 128, (2, 3, 64, 16)).astype(np.int8)
    assert (unpack_integers(pack_integers(values)) == values).all()


@pytest.mark.parametrize("name", [*PAIRS, "q8"])
def test_weight_is_integer_times_both_scales(name: str) -> None:
    packed = filled(name, lead=(2,))
    weights, values = dequantise(packed), unpack(packed)
    assert weights.shape == (2, 40, 150)
    for matrix, row, column in ((0, 0, 0), (1, 17, 70), (1, 39, 149)):
        scale = np.float32(packed.scales[matrix, row // 16, column // 64, row % 16]) * packed.row_scales[matrix, row]
        assert weights[matrix, row, column] == values[matrix, row, column] * scale


@pytest.mark.parametrize("name", PAIRS)
def test_codebooks_fit_the_kernels(name: str) -> None:
    """At most 63, so that two products with int8 fit 16 bits; and no point is there twice."""
    table = CODEBOOKS[name]
    assert table.shape == (2, FORMATS[name].points)
    assert table.dtype == np.uint8
    assert table.max() <= 63
    assert len(set(zip(*table.tolist(), strict=True))) == table.shape[1]


@pytest.mark.parametrize(("name", "bits"), [("q3", 3.125), ("q3.5", 3.625), ("q4", 4.125), ("q8", 8.125)])
def test_bits_per_weight(name: str, bits: float) -> None:
    assert bits_per_weight(filled(name, 1600, 6400)) == pytest.approx(bits + 32 / 6400)
    assert bits_per_weight(filled(name, 16, 32)) > 2 * bits  # the padding counts


def test_parts_that_do_not_fit_are_refused() -> None:
    good = filled("q4")
    with pytest.raises(ValueError, match=r"scales of a 40 × 150 q4 matrix must be uint8 \(3, 3, 16\)"):
        Packed("q4", 40, 150, 0, good.codes, good.scales[:2], good.row_scales)
    with pytest.raises(ValueError, match="row_scales"):
        Packed("q4", 40, 150, 0, good.codes, good.scales, good.row_scales.astype(np.float64))
    with pytest.raises(ValueError, match="not packed"):
        Packed("bf16", 40, 150, 0, good.codes, good.scales, good.row_scales)


def test_names() -> None:
    assert find_format("q3h") is find_format("q3.5")
    with pytest.raises(ValueError, match=r"no format is called 'q5': there are q3, q3\.5"):
        find_format("q5")
