"""Random damage to small valid files: a source opens and reads, or refuses with CheckpointError; nothing else."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from inferflow.errors import CheckpointError
from inferflow.weights.open import open_source
from tests.weights.craft import (
    ARCH,
    ARRAY,
    STRING,
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

KEYS = [
    ARCH,
    kv("tiny.block_count", 4, struct.pack("<I", 2)),
    kv("tiny.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-6)),
    kv("tiny.attention.head_count", ARRAY, struct.pack("<IQII", 4, 2, 4, 4)),
    kv("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("bc") + text("")),
]
TENSORS = [
    tensor("token_embd.weight", [32, 3], 2),
    tensor("rope_freqs.weight", [4], 0, 64),
    tensor("b", [2, 3, 2], 1, 96),
]
FACTORS = np.ones(4, np.float32).tobytes() + bytes(16)
VALID = {
    "m.gguf": gguf(KEYS, TENSORS, bytes(64) + FACTORS + bytes(32)),
    "m.safetensors": safetensors(
        {"a": entry([2, 2], 0, 16), "b": entry([3], 16, 22, "BF16"), "__metadata__": {"x": "y"}}, bytes(22)
    ),
    "m.bin": torch_zip(state_pickle(), {"0": bytes(24)}),
}


def opens_or_refuses(path: Path) -> bool:
    """True when every tensor of `path` was read, False when opening it was refused in full."""
    refusal = None
    try:
        source = open_source(path)
    except CheckpointError as error:
        refusal = error
    if refusal is not None:
        assert refusal.where
        assert refusal.fix
        assert refusal.reason
        return False
    for name, info in source.tensors.items():
        assert source.read(name).shape == info.shape
    return True


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """One to four bytes set, flipped by a bit, removed, doubled; or a 64-bit number set to an extreme."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        if not out:
            break
        at = int(rng.integers(0, len(out)))
        match int(rng.integers(0, 6)):
            case 0:
                out[at] = int(rng.integers(0, 256))
            case 1:
                out[at] ^= 1 << int(rng.integers(0, 8))
            case 2:
                del out[at : at + int(rng.integers(1, 9))]
            case 3:
                out[at:at] = out[at : at + int(rng.integers(1, 17))]
            case 4:
                extreme = [2**64 - 1, 2**63, 2**63 - 1, 2**32, 2**31, 0][int(rng.integers(0, 6))]
                out[at : at + 8] = struct.pack("<Q", extreme)
            case _:
                del out[max(at, 8) :]
    return bytes(out)


@pytest.mark.parametrize("name", VALID)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    write(tmp_path / "config.json", "{}")
    assert opens_or_refuses(write(tmp_path / name, VALID[name]))
    rng = np.random.default_rng(7)
    opened = [opens_or_refuses(write(tmp_path / name, damaged(VALID[name], rng))) for _ in range(700)]
    assert 0 < sum(opened) < len(opened)


def test_every_byte_of_the_headers_set_to_extremes(tmp_path: Path) -> None:
    write(tmp_path / "config.json", "{}")
    for name in ("m.gguf", "m.safetensors"):
        data = VALID[name]
        for at in range(0, len(data)):
            for value in (0x00, 0x7F, 0xFF):
                opens_or_refuses(write(tmp_path / name, data[:at] + bytes([value]) + data[at + 1 :]))


def test_damaged_pickles(tmp_path: Path) -> None:
    write(tmp_path / "config.json", "{}")
    rng = np.random.default_rng(11)
    for _ in range(700):
        pickled = damaged(state_pickle(), rng)
        opens_or_refuses(write(tmp_path / "m.bin", torch_zip(pickled, {"0": bytes(24)})))
    for _ in range(500):
        noise = b"\x80\x02" + rng.bytes(60)
        opens_or_refuses(write(tmp_path / "m.bin", torch_zip(noise + b".", {"0": bytes(24)})))
