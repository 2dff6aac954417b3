"""Files that are wrong on purpose: each is refused at the door, in one typed sentence, without a large allocation."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from inferflow.errors import CheckpointError
from inferflow.weights.open import open_source
from tests.weights.craft import (
    ARCH,
    ARRAY,
    STRING,
    U32,
    U64,
    Touch,
    entry,
    gguf,
    kv,
    safetensors,
    state_pickle,
    tensor,
    text,
    torch_zip,
    write,
)

Q = struct.Struct("<Q").pack
I = struct.Struct("<I").pack  # noqa: E741
GOOD = entry([2], 0, 8)
SPARE_BYTES = 4 << 20


def many_arrays(depth: int) -> bytes:
    """A metadata value: arrays within arrays."""
    return b"".join(I(ARRAY) + Q(1) for _ in range(depth)) + I(U32) + Q(0)


SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "7 bytes": (b"\x02\0\0\0\0\0\0", "too short"),
    "header of 0": (safetensors("", b"\0" * 8), "does not begin"),
    "header of 1": (safetensors("{"), "does not begin"),
    "header past the file": (safetensors({"a": GOOD}, length=4000), "cut short"),
    "header of 2**64-1": (safetensors({"a": GOOD}, length=2**64 - 1), "header would be"),
    "header of 101 MB": (safetensors({"a": GOOD}, length=101_000_000), "header would be"),
    "400,000 tensors": (
        safetensors(b"{" + b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' * 400_000),
        "a header of",
    ),
    "invalid JSON": (safetensors('{"a": }'), "not valid JSON"),
    "invalid UTF-8": (safetensors(b'{"\xff\xfe": 1}'), "not UTF-8"),
    "deep JSON": (safetensors('{"a":' + "[" * 100_000), "nested too deeply"),
    "an array": (safetensors("[1, 2]"), "does not begin"),
    "no tensors": (safetensors({}), "holds no tensors"),
    "NaN": (safetensors('{"a": NaN}'), "not valid JSON"),
    "a key twice": (safetensors('{"a": 1, "a": 2}'), "'a' appears twice"),
    "dtype twice": (safetensors('{"a": {"dtype": "F32", "dtype": "F16"}}'), "appears twice"),
    "entry is a list": (safetensors({"a": [1]}), "not described"),
    "entry without shape": (safetensors({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "not described"),
    "nameless": (safetensors({"": GOOD}, bytes(8)), "without a name"),
    "begin after end": (safetensors({"a": entry([2], 8, 0)}, bytes(8)), "after its end"),
    "end past the file": (safetensors({"a": entry([4], 0, 16)}, bytes(8)), "cut short"),
    "negative offset": (safetensors({"a": entry([2], -8, 0)}, bytes(8)), "non-negative"),
    "three offsets": (safetensors({"a": {**GOOD, "data_offsets": [0, 4, 8]}}, bytes(8)), "data_offsets"),
    "float offset": (safetensors({"a": entry([2], 0.0, 8)}, bytes(8)), "data_offsets"),
    "size and shape differ": (safetensors({"a": entry([3], 0, 8)}, bytes(8)), "needs 12 bytes and has 8"),
    "shape overflows to 8": (safetensors({"a": entry([2**62 + 1, 2], 0, 8)}, bytes(8)), "overflows"),
    "zero times overflow": (safetensors({"a": entry([2**62, 2**62, 0], 0, 0)}), "overflows"),
    "dimension of 500 digits": (
        safetensors('{"a": {"dtype":"F32","shape":[' + "9" * 500 + '],"data_offsets":[0,8]}}', bytes(8)),
        "overflows",
    ),
    "number of 5000 digits": (
        safetensors('{"a": {"dtype":"F32","shape":[' + "9" * 5000 + '],"data_offsets":[0,8]}}', bytes(8)),
        "",
    ),
    "65 dimensions": (safetensors({"a": entry([1] * 65, 0, 4)}, bytes(4)), "65 dimensions"),
    "negative dimension": (safetensors({"a": entry([-2], 0, 8)}, bytes(8)), "-2"),
    "two negative dimensions": (safetensors({"a": entry([-1, -2], 0, 8)}, bytes(8)), "-1"),
    "float dimension": (safetensors({"a": entry([2.0], 0, 8)}, bytes(8)), "2.0"),
    "bool dimension": (safetensors({"a": entry([True, 2], 0, 8)}, bytes(8)), "True"),
    "shape is a string": (safetensors({"a": entry("2", 0, 8)}, bytes(8)), "not a list"),
    "unknown dtype": (safetensors({"a": entry([2], 0, 8, "F33")}, bytes(8)), "'F33'"),
    "dtype is a list": (safetensors({"a": entry([2], 0, 8, ["F32"])}, bytes(8)), "type"),
    "overlap": (safetensors({"a": GOOD, "b": entry([2], 4, 12)}, bytes(12)), "overlaps"),
    "one range twice": (safetensors({"a": GOOD, "b": GOOD}, bytes(8)), "overlaps"),
    "hole": (safetensors({"a": GOOD, "b": entry([2], 12, 20)}, bytes(20)), "hole of 4"),
    "trailing bytes": (safetensors({"a": GOOD}, bytes(9)), "1 bytes after"),
    "metadata of numbers": (safetensors({"__metadata__": {"n": 1}, "a": GOOD}, bytes(8)), "__metadata__"),
    "metadata is a list": (safetensors({"__metadata__": ["x"], "a": GOOD}, bytes(8)), "__metadata__"),
    "cut in the header": (safetensors({"a": GOOD}, bytes(8))[:20], "cut short"),
    "cut in a tensor": (safetensors({"a": GOOD}, bytes(8))[:-4], "cut short"),
    "cut by a byte": (safetensors({"a": GOOD}, bytes(8))[:-1], "cut short"),
}

GGUFS: dict[str, tuple[bytes, str]] = {
    "magic only": (b"GGUF", "cut short"),
    "other magic": (gguf(magic=b"GGUX"), "no GGUF file"),
    "version 1": (gguf(version=1), "unsupported version 1"),
    "version 4": (gguf(version=4), "unsupported version 4"),
    "version 0": (gguf(version=0), "unsupported version 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(100), "big-endian"),
    "magic swapped": (gguf(magic=b"FUGG"), "big-endian"),
    "2**63 tensors": (gguf(n_tensors=2**63), "cannot be in a file"),
    "2**63 keys": (gguf(n_kv=2**63), "cannot be in a file"),
    "2**64-1 of both": (gguf(n_kv=2**64 - 1, n_tensors=2**64 - 1), "cannot be in a file"),
    "one key too many": (gguf(n_kv=2), "corrupt GGUF"),
    "key of 2**64-1": (gguf([Q(2**64 - 1) + b"general.architecture", ARCH]), "cannot be in a file"),
    "string of 2**64-1": (gguf([ARCH, kv("general.name", STRING, Q(2**64 - 1))]), "cannot be in a file"),
    "string of 2**63": (gguf([ARCH, kv("general.name", STRING, Q(2**63))]), "cannot be in a file"),
    "key without a name": (gguf([kv("", U32, I(1)), ARCH]), "0 bytes long"),
    "key of 64 KiB": (gguf([kv("k" * 65536, U32, I(1)), ARCH]), "65536 bytes long"),
    "key not UTF-8": (gguf([kv(b"\xff\xfe", U32, I(1)), ARCH]), "not UTF-8"),
    "key twice": (gguf([ARCH, ARCH]), "appears twice"),
    "value of type 13": (gguf([ARCH, kv("x", 13, b"")]), "unknown type 13"),
    "array of type 99": (gguf([ARCH, kv("x", ARRAY, I(99) + Q(1))]), "unknown type 99"),
    "array of 2**63 bytes": (gguf([ARCH, kv("x", ARRAY, I(0) + Q(2**63))]), "cannot be in a file"),
    "array of 2**61 u64": (gguf([ARCH, kv("x", ARRAY, I(U64) + Q(2**61))]), "cannot be in a file"),
    "array of 2**61 strings": (gguf([ARCH, kv("x", ARRAY, I(STRING) + Q(2**61))]), "cannot be in a file"),
    "string in array of 2**64-1": (
        gguf([ARCH, kv("x", ARRAY, I(STRING) + Q(2) + Q(2**64 - 9) + Q(0))]),
        "past the end",
    ),
    "string in array past end": (gguf([ARCH, kv("x", ARRAY, I(STRING) + Q(1) + Q(10**6))]), "past the end"),
    "arrays 5 deep": (gguf([ARCH, kv("x", ARRAY, many_arrays(5)[4:])]), "cannot be in a file|nests|corrupt"),
    "arrays 50 deep": (gguf([ARCH, kv("x", ARRAY, many_arrays(50))]), "nests arrays"),
    "10**5 arrays deep": (gguf([ARCH, kv("x", ARRAY, many_arrays(100_000))]), "nests arrays"),
    "an adapter": (gguf([ARCH, kv("general.type", STRING, text("adapter"))]), "holds an adapter"),
    "factors absent": (gguf([ARCH, kv("tiny.rope.scaling.type", STRING, text("longrope"))]), "lacks the tensors"),
    "scaling type is a number": (gguf([ARCH, kv("tiny.rope.scaling.type", U32, I(1))]), "not a string"),
    "no architecture": (gguf([kv("general.name", STRING, text("x"))]), "general.architecture"),
    "architecture is a number": (gguf([kv("general.architecture", U32, I(1))]), "general.architecture"),
    "width is a string": (gguf([ARCH, kv("tiny.embedding_length", STRING, text("many"))]), "not of type int"),
    "epsilon is NaN": (
        gguf([ARCH, kv("tiny.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", float("nan")))]),
        "not of type float",
    ),
    "alignment 0": (gguf([ARCH, kv("general.alignment", U32, I(0))]), "power of two"),
    "alignment 24": (gguf([ARCH, kv("general.alignment", U32, I(24))]), "power of two"),
    "alignment 2**31": (gguf([ARCH, kv("general.alignment", U32, I(2**31))]), "cut short"),
    "alignment is a string": (gguf([ARCH, kv("general.alignment", STRING, text("32"))]), "power of two"),
    "no tensors": (gguf(tensors=[], data=b""), "no tensors"),
    "0 dimensions": (gguf(tensors=[tensor("a", [], n_dims=0), bytes(64)], n_tensors=1), "0 dimensions"),
    "5 dimensions": (gguf(tensors=[tensor("a", [1] * 5)]), "5 dimensions"),
    "2**32-1 dimensions": (gguf(tensors=[tensor("a", [8, 2], n_dims=2**32 - 1)]), "4294967295 dimensions"),
    "dimension of 0": (gguf(tensors=[tensor("a", [8, 0])]), "impossible shape"),
    "product 2**65": (gguf(tensors=[tensor("a", [2**64 - 1, 2])]), "impossible shape"),
    "product wraps to 16": (gguf(tensors=[tensor("a", [2**33, 2**31, 2, 4])]), "impossible shape"),
    "type 999": (gguf(tensors=[tensor("a", [8, 2], 999)]), "unknown type 999"),
    "removed type Q4_2": (gguf(tensors=[tensor("a", [32, 2], 4)]), "unknown type 4"),
    "type for activations": (gguf(tensors=[tensor("a", [256], 15)], data=bytes(320)), "Q8_K"),
    "tensor twice": (gguf(tensors=[tensor("a", [8]), tensor("a", [8], offset=32)]), "appears twice"),
    "tensor without a name": (gguf(tensors=[tensor("", [8, 2]), bytes(8)], n_tensors=1), "0 bytes long"),
    "tensor's name not UTF-8": (gguf(tensors=[tensor(b"\xc3", [8, 2])]), "not UTF-8"),
    "misaligned": (gguf(tensors=[tensor("a", [8], offset=4)]), "not aligned"),
    "overlap": (gguf(tensors=[tensor("a", [16]), tensor("b", [8], offset=32)]), "overlaps"),
    "offset past the file": (gguf(tensors=[tensor("a", [8], offset=1 << 20)]), "cut short"),
    "offset wraps": (gguf(tensors=[tensor("a", [8], offset=2**64 - 32)]), "cut short"),
    "rows of half a block": (gguf(tensors=[tensor("a", [48, 2], 2)]), "not a multiple"),
    "rows of half a K block": (gguf(tensors=[tensor("a", [128, 2], 12)]), "not a multiple"),
    "trailing megabyte": (gguf(data=bytes(64 + (1 << 20))), "after its last tensor"),
    "cut in the header": (gguf()[:40], "corrupt GGUF"),
    "cut in a tensor": (gguf()[:-32], "cut short"),
    "cut by a byte": (gguf()[:-1], "cut short"),
    "factors are zero": (gguf(tensors=[tensor("rope_freqs.weight", [8, 2])]), "shape"),
    "factors not positive": (gguf(tensors=[tensor("rope_freqs.weight", [16])]), "not positive"),
    "one of two factors": (gguf(tensors=[tensor("rope_factors_long.weight", [16])]), "rope_factors_short"),
}

PICKLES: dict[str, tuple[bytes, str]] = {
    "storage too small": (torch_zip(state_pickle(), {"0": bytes(20)}), "archive holds 20"),
    "storage absent": (torch_zip(state_pickle(key="7"), {"0": bytes(24)}), "storage '7'"),
    "offset past the storage": (torch_zip(state_pickle(offset=1), {"0": bytes(24)}), "reaches byte 28"),
    "offset of 2**61": (torch_zip(state_pickle(offset=2**61), {"0": bytes(24)}), "reaches byte"),
    "negative offset": (torch_zip(state_pickle(offset=-1), {"0": bytes(24)}), "no proper numbers"),
    "negative stride": (torch_zip(state_pickle(stride=(-3, 1)), {"0": bytes(24)}), "no proper numbers"),
    "stride past the storage": (torch_zip(state_pickle(stride=(4, 1)), {"0": bytes(24)}), "reaches byte 28"),
    "expanded to 2**40": (torch_zip(state_pickle(shape=(2**40,), stride=(0,)), {"0": bytes(24)}), "overlapping"),
    "huge shape": (torch_zip(state_pickle(shape=(2**62, 2**62), stride=(0, 0)), {"0": bytes(24)}), "overflows"),
    "negative dimension": (torch_zip(state_pickle(shape=(-2, -3)), {"0": bytes(24)}), "-2"),
    "shape of strings": (torch_zip(state_pickle(shape=("2", "3")), {"0": bytes(24)}), "'2'"),
    "strides too few": (torch_zip(state_pickle(stride=(1,)), {"0": bytes(24)}), "no proper numbers"),
    "numel of 2**70": (torch_zip(state_pickle(numel=2**70), {"0": bytes(24)}), "proper name or size"),
    "unknown storage": (torch_zip(state_pickle(storage="EvilStorage"), {"0": bytes(24)}), "torch.EvilStorage"),
    "os.system": (torch_zip(b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.", {}), "os.system"),
    "builtins.eval": (torch_zip(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", {}), "builtins.eval"),
    "dotted attribute": (torch_zip(b"\x80\x02ctorch\nFloatStorage.__class__\n.", {}), "FloatStorage.__class__"),
    "global of no name": (torch_zip(b"\x80\x04NN\x93.", {}), "no string"),
    "opcode INST": (torch_zip(b"\x80\x02(ios\nsystem\n.", {}), "0x69"),
    "opcode OBJ": (torch_zip(b"\x80\x02(No.", {}), "0x6f"),
    "opcode EXT1": (torch_zip(b"\x80\x02\x82\x01.", {}), "0x82"),
    "bytearray of 2**60": (torch_zip(b"\x80\x05\x96" + Q(2**60) + b".", {}), "0x96"),
    "string of 4 GiB": (torch_zip(b"\x80\x02X\xff\xff\xff\xff.", {}), "cut short"),
    "memo of 2**32-1": (torch_zip(b"\x80\x02}r\xff\xff\xff\xff.", {}), "holds no tensors"),
    "a stack of lists": (torch_zip(b"\x80\x02" + b"]" * (1 << 18) + b".", {}), "piles up"),
    "empty stack": (torch_zip(b"\x80\x02R.", {}), "takes more"),
    "no STOP": (torch_zip(b"\x80\x02}", {}), "cut short"),
    "a list": (torch_zip(pickle.dumps([1, 2], 2), {}), "no dict of tensors"),
    "compressed": (
        torch_zip(state_pickle() + bytes(1 << 20), {"0": bytes(24)}, compression=zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "cut archive": (torch_zip(state_pickle(), {"0": bytes(24)})[:-30], "no intact zip"),
    "no data.pkl": (torch_zip(b"", {}).replace(b"data.pkl", b"data.txt"), "not one of weights"),
    "old torch format": (pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps({"a": 1}, 2), "old format"),
}

IMPOSTORS: dict[str, tuple[bytes, str]] = {
    "Git-LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git-LFS pointer"),
    "HTML page": (b"\n <!DOCTYPE html><html><body>404</body></html>", "web page"),
    "XML error": (b'<?xml version="1.0"?><Error>AccessDenied</Error>', "web page"),
    "empty": (b"", "empty"),
    "old GGML": (b"lmgg" + bytes(100), "old GGML"),
    "old GGJT": (b"tjgg" + bytes(100), "ggjt"),
    "gzip": (b"\x1f\x8b" + bytes(100), "gzip"),
    "empty zip": (b"PK\x05\x06" + bytes(18), "empty zip"),
    "tar": (bytes(257) + b"ustar" + bytes(600), "tar archive"),
    "zeros": (bytes(4096), ""),
    "0xff": (b"\xff" * 4096, ""),
    "text": (b"hello, world\n" * 20, ""),
}


def index(weight_map: object) -> str:
    import json

    return json.dumps({"weight_map": weight_map})


SHARD = safetensors({"a": GOOD}, bytes(8))
S1, S2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = {"config.json": "{}"}

DIRECTORIES: dict[str, tuple[dict[str, bytes | str], str]] = {
    "empty": ({}, "holds no model"),
    "config only": (CONFIG, "holds no model"),
    "no config": ({"model.safetensors": SHARD}, "no config.json"),
    "config is a list": ({"config.json": "[]", "model.safetensors": SHARD}, "object is expected"),
    "config is cut": ({"config.json": '{"a": ', "model.safetensors": SHARD}, "not valid JSON"),
    "config not UTF-8": ({"config.json": b'{"a": "\xff"}', "model.safetensors": SHARD}, "not UTF-8"),
    "config with NaN": ({"config.json": '{"a": NaN}', "model.safetensors": SHARD}, "NaN"),
    "config 100 deep": ({"config.json": '{"a":' * 100 + "1" + "}" * 100, "model.safetensors": SHARD}, "64 levels"),
    "config 10**6 deep": ({"config.json": "[" * 10**6, "model.safetensors": SHARD}, "nested too deeply"),
    "config too long": ({"config.json": " " * (17 << 20), "model.safetensors": SHARD}, "at most"),
    "config is a pointer": ({"config.json": "version https://git-lfs.x", "model.safetensors": SHARD}, "Git-LFS"),
    "generation config is cut": (
        {**CONFIG, "generation_config.json": "{", "model.safetensors": SHARD},
        "not valid JSON",
    ),
    "index only": (
        {**CONFIG, INDEX: index({"a": S1, "b": S2, "c": S2})},
        f"{S1}, which is not there and should hold 1",
    ),
    "a shard missing": (
        {**CONFIG, INDEX: index({"a": S1, "b": S2, "c": S2}), S1: SHARD},
        f"{S2}, which is not there and should hold 2",
    ),
    "shard lacks a tensor": (
        {**CONFIG, INDEX: index({"a": S1, "b": S2}), S1: SHARD, S2: SHARD},
        "holds tensor 'b', which it does not",
    ),
    "two shards, index silent": ({**CONFIG, S1: SHARD, S2: SHARD}, "no index says"),
    "split incomplete": ({**CONFIG, S1: SHARD}, "shard is missing"),
    "index of a list": ({**CONFIG, INDEX: index([S1])}, "weight_map"),
    "index without a map": ({**CONFIG, INDEX: "{}"}, "weight_map"),
    "index with a number": ({**CONFIG, INDEX: index({"a": 1})}, "not a file name"),
    "index climbs": ({**CONFIG, INDEX: index({"a": "../x.safetensors"})}, "outside"),
    "index climbs inside": ({**CONFIG, INDEX: index({"a": "x/../../y.safetensors"})}, "outside"),
    "index climbs on Windows": ({**CONFIG, INDEX: index({"a": "..\\x.safetensors"})}, "outside"),
    "index is absolute": ({**CONFIG, INDEX: index({"a": "/etc/passwd"})}, "outside"),
    "index names nothing": ({**CONFIG, INDEX: index({"a": ""})}, "outside"),
    "index with NUL": ({**CONFIG, INDEX: index({"a": "x\0y"})}, "outside"),
    "shard is a pointer": ({**CONFIG, INDEX: index({"a": S1}), S1: "version https://git-lfs.x"}, "Git-LFS"),
    "weights are a pointer": ({**CONFIG, "model.safetensors": "version https://git-lfs.x"}, "Git-LFS"),
    "two safetensors": ({**CONFIG, "a.safetensors": SHARD, "b.safetensors": SHARD}, "a.safetensors, b.safetensors"),
    "two GGUFs": ({"a.gguf": gguf(), "b.gguf": gguf()}, "a.gguf, b.gguf"),
    "an adapter": ({**CONFIG, "adapter_model.safetensors": SHARD}, "adapter"),
    "GGUF shard without its split": ({"x.gguf": gguf([ARCH, kv("split.count", 2, b"\2\0")])}, "one shard of 2"),
    "GGUF split incomplete": (
        {"x-00001-of-00002.gguf": gguf([ARCH, kv("split.count", 2, b"\2\0")])},
        "shard is missing",
    ),
    "GGUF split of doubles": (
        {f"x-0000{i}-of-00002.gguf": gguf([ARCH, kv("split.count", 2, b"\2\0")]) for i in (1, 2)},
        "another shard holds",
    ),
    "GGUF split misnumbered": (
        {
            f"x-0000{i}-of-00002.gguf": gguf([ARCH, kv("split.count", 2, b"\2\0"), kv("split.no", 2, b"\1\0")])
            for i in (1, 2)
        },
        "is not shard 1",
    ),
}

CASES = [
    *((f"safetensors: {name}", "model.safetensors", *case) for name, case in SAFETENSORS.items()),
    *((f"gguf: {name}", "model.gguf", *case) for name, case in GGUFS.items()),
    *((f"torch: {name}", "pytorch_model.bin", *case) for name, case in PICKLES.items()),
    *(
        (f"{file}: {name}", file, *case)
        for name, case in IMPOSTORS.items()
        for file in ("m.safetensors", "m.gguf", "m.bin", "m.x")
    ),
]


def refused(path: Path, size: int) -> CheckpointError:
    """The refusal of `path`, having allocated at most `size` and a little."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_source(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size + SPARE_BYTES
    assert caught.value.where
    assert caught.value.fix
    assert caught.value.reason
    assert len(str(caught.value)) < 1500
    return caught.value


@pytest.mark.parametrize(("file", "data", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_hostile_file(file: str, data: bytes, reason: str, tmp_path: Path) -> None:
    write(tmp_path / "config.json", "{}")
    error = refused(write(tmp_path / file, data), len(data))
    assert any(part in error.reason for part in reason.split("|"))


@pytest.mark.parametrize(("contents", "reason"), DIRECTORIES.values(), ids=DIRECTORIES.keys())
def test_hostile_directory(contents: dict[str, bytes | str], reason: str, tmp_path: Path) -> None:
    for name, data in contents.items():
        write(tmp_path / name, data)
    error = refused(tmp_path, sum(map(len, contents.values())))
    assert reason in error.reason


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    write(tmp_path / "config.json", "{}")
    for protocol in range(2, 6):
        attack = pickle.dumps({"w": Touch(marker)}, protocol)
        error = refused(write(tmp_path / "pytorch_model.bin", torch_zip(attack, {})), len(attack))
        assert "refused" in error.reason
        assert not marker.exists()
    pickle.loads(attack)  # the attack works where pickles are run
    assert marker.exists()


def test_safetensors_come_before_a_pickle(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    write(tmp_path / "config.json", "{}")
    write(tmp_path / "pytorch_model.bin", torch_zip(pickle.dumps(Touch(marker), 2), {}))
    write(tmp_path / "model.safetensors", SHARD)
    assert open_source(tmp_path).format == "safetensors"
    assert not marker.exists()


def test_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    write(tmp_path / "model.gguf", gguf())
    assert "not a regular file" in refused(tmp_path / "pipe.gguf", 0).reason
    assert refused(tmp_path / "modle.gguf", 0).fix == "did you mean 'model.gguf'?"
    assert refused(Path("x" * 5000), 0).reason
    assert refused(Path("a\0b"), 0).reason


def test_every_cut_of_a_valid_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "config.json", "{}")
    for name, whole in (("m.gguf", gguf()), ("m.safetensors", SHARD)):
        for size in range(len(whole)):
            refused(write(tmp_path / name, whole[:size]), size)
        assert open_source(write(tmp_path / name, whole)).tensors
