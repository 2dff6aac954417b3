"""GGUF sources against the format's own writer and dequantisers, split files included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES

from inferflow.weights.gguf_header import StringArray
from inferflow.weights.gguf_types import TYPES
from inferflow.weights.open import open_source
from tests.weights.craft import ARCH, ARRAY, STRING, U32, gguf, kv, text, write

RNG = np.random.default_rng(0)
BLOCKS = [GGMLQuantizationType[kind.name] for kind in TYPES.values() if kind.weights > 1 and kind.served]


def written(path: Path, tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType | None]], **keys: object) -> Path:
    writer = GGUFWriter(path, "tiny")
    for key, value in keys.items():
        getattr(writer, key)(value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_blocks(kind: GGMLQuantizationType, rows: int, width: int) -> np.ndarray:
    """Quantised noise, or random bytes where `gguf` cannot quantise."""
    try:
        return quants.quantize(RNG.standard_normal((rows, width)).astype(np.float32), kind)
    except NotImplementedError:
        weights, size = GGML_QUANT_SIZES[kind]
        return RNG.integers(0, 256, (rows, width // weights * size), np.uint8)


def test_the_table_of_types_is_the_formats() -> None:
    for number, kind in TYPES.items():
        assert GGMLQuantizationType(number).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.weights, kind.nbytes)
    assert {int(kind) for kind in GGMLQuantizationType} == set(TYPES)
    assert {kind.name for kind in BLOCKS} == {kind.name for kind in quants._type_traits} - {"BF16"}


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_block_types_dequantise_as_gguf_does(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    blocks = stored_blocks(kind, 6, 512)
    source = open_source(written(tmp_path / "m.gguf", {"w": (blocks, kind)}))
    assert source.tensors["w"].dtype == kind.name
    assert source.tensors["w"].shape == (6, 512)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks, kind)
    got = source.read("w")
    assert got.dtype == np.float32
    assert got.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(source.raw("w"), blocks)
    assert np.shares_memory(source.raw("w"), source.raw("w"))


def test_slabs_join(tmp_path: Path) -> None:
    """More blocks than are dequantised at a time, in three dimensions."""
    blocks = np.stack([stored_blocks(GGMLQuantizationType.Q4_0, 300, 256) for _ in range(4)])
    source = open_source(written(tmp_path / "m.gguf", {"w": (blocks, GGMLQuantizationType.Q4_0)}))
    np.testing.assert_array_equal(source.read("w"), quants.dequantize(blocks, GGMLQuantizationType.Q4_0))
    assert source.tensors["w"].shape == (4, 300, 256)
    assert source.raw("w").shape == (4, 300, 256 // 32 * 18)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "int16", "int32", "int64"])
def test_plain_types(dtype: str, tmp_path: Path) -> None:
    array = (RNG.standard_normal((3, 5)) * 50).astype(dtype)
    got = open_source(written(tmp_path / "m.gguf", {"w": (array, None)})).read("w")
    np.testing.assert_array_equal(got, array.astype(np.float32) if "float" in dtype else array)
    assert got.dtype == (np.float32 if "float" in dtype else array.dtype)


def test_bfloat16(tmp_path: Path) -> None:
    array = RNG.standard_normal((3, 8)).astype(np.float32)
    blocks = quants.quantize(array, GGMLQuantizationType.BF16)
    got = open_source(written(tmp_path / "m.gguf", {"w": (blocks, GGMLQuantizationType.BF16)})).read("w")
    assert (got.view(np.uint32) & 0xFFFF == 0).all()
    np.testing.assert_allclose(got, array, rtol=2**-8)


def test_float32_is_a_read_only_view(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "m.gguf", {"w": (np.ones((4, 4), np.float32), None)}))
    view = source.read("w")
    assert np.shares_memory(view, source.raw("w"))
    assert not view.flags.writeable
    source.close()
    assert (view == 1).all()


def test_versions_2_and_3_and_an_unaligned_alignment(tmp_path: Path) -> None:
    data = np.arange(16, dtype=np.float32).tobytes()
    for version in (2, 3):
        source = open_source(write(tmp_path / "m.gguf", gguf(data=data, version=version)))
        assert source.read("a.weight").shape == (2, 8)
    one = [ARCH, kv("general.alignment", U32, b"\1\0\0\0"), kv("pad", STRING, text("x"))]
    source = open_source(write(tmp_path / "m.gguf", gguf(one, data=data, alignment=1)))
    got = source.read("a.weight")
    assert got.flags.aligned
    np.testing.assert_array_equal(got.reshape(-1), np.arange(16))


def test_metadata_values(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "tiny")
    values = {
        "uint8": 200,
        "int8": -5,
        "uint16": 60000,
        "int16": -3,
        "uint32": 2**32 - 1,
        "int32": -7,
        "uint64": 2**64 - 1,
    }
    values |= {"int64": -(2**60), "float32": 0.5, "float64": 0.1, "bool": True, "string": "grüß"}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    words = ["", "a", "Ġthe", "日本", "x" * 300]
    writer.add_array("x.words", words)
    writer.add_array("x.numbers", [1, -2, 3])
    writer.add_array("x.floats", [0.5, 1.5])
    writer.add_array("x.flags", [True, False])
    writer.add_tensor("w", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = open_source(tmp_path / "m.gguf").metadata
    assert {kind: metadata[f"x.{kind}"] for kind in values} == values
    array = metadata["x.words"]
    assert isinstance(array, StringArray)
    assert list(array) == words
    assert [array[i] for i in range(-1, 4)] == [words[-1], *words[:4]]
    assert array[1:3] == words[1:3]
    assert array.raw(3) == "日本".encode()
    with pytest.raises(IndexError):
        array[5]
    assert metadata["x.numbers"].tolist() == [1, -2, 3]
    assert metadata["x.floats"].dtype == np.float32
    assert metadata["x.flags"].tolist() == [True, False]


def test_nested_and_empty_arrays_and_stray_bytes(tmp_path: Path) -> None:
    inner = b"\x04\0\0\0" + (2).to_bytes(8, "little") + b"\1\0\0\0\2\0\0\0"
    nested = kv("x", ARRAY, b"\x09\0\0\0" + (2).to_bytes(8, "little") + inner + inner)
    stray = kv("y", ARRAY, b"\x08\0\0\0" + (2).to_bytes(8, "little") + text(b"\xff\xfe") + text("ok"))
    empty = kv("z", ARRAY, b"\x08\0\0\0" + bytes(8))
    metadata = open_source(write(tmp_path / "m.gguf", gguf([ARCH, nested, stray, empty]))).metadata
    assert [part.tolist() for part in metadata["x"]] == [[1, 2], [1, 2]]
    assert list(metadata["y"]) == ["\ufffd\ufffd", "ok"]
    assert metadata["y"].raw(0) == b"\xff\xfe"
    assert list(metadata["z"]) == []


def split_files(folder: Path) -> dict[str, np.ndarray]:
    writer = GGUFWriter(folder / "m.gguf", "tiny", split_max_tensors=2)
    writer.add_block_count(3)
    arrays = {f"blk.{i}.w": RNG.standard_normal((2, 8)).astype(np.float32) for i in range(5)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def test_split_files(tmp_path: Path) -> None:
    arrays = split_files(tmp_path)
    assert len(list(tmp_path.glob("*.gguf"))) == 3
    for path in (tmp_path, tmp_path / "m-00001-of-00003.gguf", tmp_path / "m-00003-of-00003.gguf"):
        source = open_source(path)
        assert source.config["num_hidden_layers"] == 3
        assert set(source.tensors) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(source.read(name), array)


def test_a_projector_beside_the_model_is_not_a_second_model(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", gguf())
    write(tmp_path / "mmproj-m.gguf", gguf())
    assert open_source(tmp_path).path == tmp_path / "m.gguf"


def test_dequantising_loads_little_of_the_gguf_package(tmp_path: Path) -> None:
    path = written(
        tmp_path / "m.gguf", {"w": (stored_blocks(GGMLQuantizationType.Q8_0, 2, 32), GGMLQuantizationType.Q8_0)}
    )
    code = (
        "import sys\nfrom inferflow.weights.open import open_source\n"
        f"source = open_source({str(path)!r})\n"
        "print(any('gguf.' in name and not name.startswith('inferflow.') for name in sys.modules))\n"
        "source.read('w')\nprint(sorted({'gguf', 'yaml', 'tqdm', 'sentencepiece', 'torch'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout
    assert out.split() == ["False", "[]"]


def test_the_demo_model(smollm2_path: Path) -> None:
    source = open_source(smollm2_path)
    assert len(source.tensors) == 272
    config = source.config
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (576, 9, 3)
    assert (config["vocab_size"], config["tie_word_embeddings"], config["rms_norm_eps"]) == (49152, True, 1e-5)
    assert source.read("blk.29.ffn_down.weight").shape == (576, 1536)
    assert source.metadata["tokenizer.ggml.tokens"][300] == "om"
