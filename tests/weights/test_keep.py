"""GGUF blocks taken over without loss: every type against `gguf`, and the layout against its words in abi.h."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

from inferflow.graph.axes import Axis
from inferflow.graph.graph import Weight
from inferflow.graph.scope import ModelScope
from inferflow.spec.document import Table, Where
from inferflow.weights.choice import KEEP
from inferflow.weights.gguf_keep import KEPT, keep_blocks
from inferflow.weights.open import open_source
from inferflow.weights.reader import Plan, Weights
from inferflow.weights.source import Source
from inferflow.weights.stored import Stored, quantised
from inferflow.weights.tiles import pack_tiles, unpack_tiles
from inferflow.weights.transform import Transform, parse_axes
from tests.weights.test_gguf import written

KINDS = [GGMLQuantizationType[name] for name in KEPT]
HERE = Where("test")


def random_blocks(kind: GGMLQuantizationType, rows: int, width: int) -> np.ndarray:
    """Random bytes whose scales are finite."""
    rng = np.random.default_rng(int(kind))
    weights, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, width // weights * size), np.uint8)
    blocks = raw.reshape(-1, size)
    with np.errstate(all="ignore"):
        bad = ~np.isfinite(quants.dequantize(blocks, kind)).all(1)
    blocks[bad] = 0
    return raw


def test_the_steps_of_a_tile_are_where_the_layout_says() -> None:
    values = np.random.default_rng(0).integers(0, 128, (40, 96)).astype(np.uint8)
    codes = pack_tiles(values, 32, nibbles=False)
    halves = pack_tiles(values & 15, 32, nibbles=True)
    assert codes.shape == (3, 3, 512)
    assert halves.shape == (3, 3, 256)
    for row, column in ((0, 0), (7, 33), (18, 95), (39, 64), (33, 6)):
        tile, group, step, lane = row // 16, column // 32, column % 32 // 4, row % 16 * 4 + column % 4
        assert codes[tile, group, 64 * step + lane] == values[row, column]
        byte = halves[tile, group, step // 2 * 64 + lane]
        assert (byte >> 4 if step % 2 else byte & 15) == values[row, column] & 15
    assert not codes[2].reshape(3, 8, 16, 4)[:, :, 8:].any()  # rows that pad the last tile
    np.testing.assert_array_equal(unpack_tiles(codes, 40, nibbles=False), values)
    np.testing.assert_array_equal(unpack_tiles(halves, 40, nibbles=True), values & 15)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kept_blocks_are_worth_what_gguf_says(kind: GGMLQuantizationType) -> None:
    raw = random_blocks(kind, 37, 512)
    kept = KEPT[kind.name]
    codes, scales, mins = keep_blocks(raw, kind.name, *GGML_QUANT_SIZES[kind])
    assert (mins is not None) == kept.has_min
    assert scales.shape == (3, 512 // kept.group, 16)
    integers = codes.view(np.int8) if kept.format == "keep8" else codes
    assert kept.format != "keep7" or integers.max() <= 127
    stored = Stored(kept.format, (37, 512), codes, kept.group, 0, scales, mins)
    expected = quants.dequantize(raw, kind)
    np.testing.assert_array_equal(stored.widen(), expected)  # not one bit, but for the sign of zeros
    assert np.abs(expected).max() > 0


def test_slabs_of_a_large_matrix_join() -> None:
    kind = GGMLQuantizationType.Q4_K
    raw = random_blocks(kind, 600, 2048)
    codes, scales, mins = keep_blocks(raw, "Q4_K", 256, 144)
    stored = Stored("keep4", (600, 2048), codes, 32, 0, scales, mins)
    np.testing.assert_array_equal(stored.widen(), quants.dequantize(raw, kind))


def one_weight(source: Source, sizes: tuple[int, ...], names: tuple[str, ...], made: Transform | None) -> Weights:
    weight = Weight("w", "weight", tuple(Axis(f"a{n}", size) for n, size in enumerate(sizes)))
    scope = ModelScope(Table({}), {}, source.tensors)
    return Weights(source, {weight.key: Plan(weight, names, len(names) > 1, made)}, scope, {weight.key: KEEP})


def transform(
    axes: str, split: str | None = None, sizes: tuple[int, ...] = (), part: int = 0, **known: int
) -> Transform:
    return Transform(*parse_axes(axes, HERE), split, sizes, part, known, None, HERE, HERE)


@pytest.mark.parametrize(
    ("made", "sizes", "format_"),
    [
        (None, (96, 256), "keep4"),
        (transform("part in", "part", (32, 64), 1), (64, 256), "keep4"),
        (transform("(h n hd) in -> (n h hd) in", h=3, n=2), (96, 256), "keep4"),
        (transform("(h part hd) in -> part h hd in", "part", (1, 1), 1, h=3), (48, 256), "keep4"),
        (transform("(e out) in -> e out in", e=3), (3, 32, 256), "keep4"),
        (transform("(e out) in -> e out in", e=8), (8, 12, 256), "keep4"),
        (transform("out in -> in out"), (256, 96), "f32"),
        (transform("out (part in)", "part", (1, 1), 1), (96, 128), "f32"),
    ],
)
def test_rows_are_chosen_before_they_are_tiled(
    made: Transform | None, sizes: tuple[int, ...], format_: str, tmp_path: Path
) -> None:
    raw = random_blocks(GGMLQuantizationType.Q4_K, 96, 256)
    source = open_source(written(tmp_path / "m.gguf", {"w": (raw, GGMLQuantizationType.Q4_K)}))
    weights = one_weight(source, sizes, ("w",), made)
    stored = weights.stored("w.weight")
    assert stored.format == format_
    assert stored.widen().shape == sizes
    np.testing.assert_array_equal(stored.widen(), weights.array("w.weight"))
    whole = quants.dequantize(raw, GGMLQuantizationType.Q4_K)
    np.testing.assert_array_equal(weights.array("w.weight"), (made.apply(whole) if made else whole).reshape(sizes))


def test_experts_in_tensors_of_their_own_are_stacked(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q8_0
    raws = [random_blocks(kind, 20, 64), random_blocks(kind, 20, 64)[::-1].copy()]
    source = open_source(written(tmp_path / "m.gguf", {f"w.{n}": (raw, kind) for n, raw in enumerate(raws)}))
    weights = one_weight(source, (2, 20, 64), ("w.0", "w.1"), None)
    slabs = list(weights.slabs("w.weight"))
    assert [slab.shape for slab in slabs] == [(1, 20, 64)] * 2
    np.testing.assert_array_equal(np.concatenate(slabs), weights.array("w.weight"))
    stored = weights.stored("w.weight")
    assert stored.codes.shape == (2, 2, 2, 512)
    np.testing.assert_array_equal(stored.widen(), np.stack([quants.dequantize(raw, kind) for raw in raws]))


@pytest.mark.parametrize("kind", ["IQ2_XXS", "TQ2_0"])
def test_other_blocks_are_widened_exactly(kind: str, tmp_path: Path) -> None:
    numbered = GGMLQuantizationType[kind]
    raw = random_blocks(numbered, 16, 256)
    source = open_source(written(tmp_path / "m.gguf", {"w": (raw, numbered)}))
    stored = one_weight(source, (16, 256), ("w",), None).stored("w.weight")
    assert stored.format in ("bf16", "f16", "f32")
    np.testing.assert_array_equal(stored.widen(), quants.dequantize(raw, numbered))


@pytest.mark.parametrize(
    ("made", "sizes"),
    [
        (None, (96, 256)),
        (transform("(h n hd) in -> (n h hd) in", h=3, n=2), (96, 256)),
        (transform("(e out) in -> e out in", e=3), (3, 32, 256)),
        (transform("out in -> in out"), (256, 96)),
    ],
)
def test_a_matrix_can_be_read_in_slabs(made: Transform | None, sizes: tuple[int, ...], tmp_path: Path) -> None:
    raw = random_blocks(GGMLQuantizationType.Q4_K, 96, 256)
    source = open_source(written(tmp_path / "m.gguf", {"w": (raw, GGMLQuantizationType.Q4_K)}))
    weights = one_weight(source, sizes, ("w",), made)
    slabs = list(weights.slabs("w.weight", elements=48 * 256))
    assert len(slabs) > 1
    np.testing.assert_array_equal(np.concatenate(slabs), weights.array("w.weight"))
    for format_ in ("q4", "q8"):
        weights.formats = {"w.weight": format_}
        stored = weights.make("w.weight")
        assert stored.shape == stored.widen().shape == sizes
        np.testing.assert_array_equal(
            stored.widen(), quantised(weights._read(weights.plans["w.weight"]), format_).widen()
        )
