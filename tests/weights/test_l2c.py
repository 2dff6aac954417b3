"""karpathy's .bin, versions 0, 1 and 2, written here by the format's rules."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from inferflow.errors import CheckpointError, UnsupportedError
from inferflow.weights.open import open_source
from tests.weights.craft import write

DIM, HIDDEN, LAYERS, HEADS, KV, VOCAB, CONTEXT, GROUP = 16, 32, 2, 4, 2, 10, 6, 8
PER_LAYER = {
    "input_layernorm": (DIM,),
    "self_attn.q_proj": (DIM, DIM),
    "self_attn.k_proj": (DIM // 2, DIM),
    "self_attn.v_proj": (DIM // 2, DIM),
    "self_attn.o_proj": (DIM, DIM),
    "post_attention_layernorm": (DIM,),
    "mlp.gate_proj": (HIDDEN, DIM),
    "mlp.down_proj": (DIM, HIDDEN),
    "mlp.up_proj": (HIDDEN, DIM),
}


def weights(tied: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    shapes |= {f"model.layers.{i}.{k}.weight": s for k, s in PER_LAYER.items() for i in range(LAYERS)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, DIM)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def of(w: dict[str, np.ndarray], *parts: str) -> list[np.ndarray]:
    return [w[f"model.layers.{i}.{part}.weight"] for part in parts for i in range(LAYERS)]


def version0(w: dict[str, np.ndarray], tied: bool) -> bytes:
    head = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV, VOCAB if tied else -VOCAB, CONTEXT)
    order = [w["model.embed_tokens.weight"], *of(w, *PER_LAYER), w["model.norm.weight"]]
    order.append(np.full(CONTEXT * DIM // HEADS, 9, np.float32))  # rotary tables
    return head + b"".join(a.tobytes() for a in order + ([] if tied else [w["lm_head.weight"]]))


def header(version: int, tied: bool) -> bytes:
    sizes = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV, VOCAB, CONTEXT)
    return (struct.pack("<Ii", 0x616B3432, version) + sizes + struct.pack("<Bi", tied, GROUP)).ljust(256, b"\0")


def split(w: dict[str, np.ndarray], tied: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    norms = [*of(w, "input_layernorm", "post_attention_layernorm"), w["model.norm.weight"]]
    matrices = [w["model.embed_tokens.weight"], *of(w, *(part for part in PER_LAYER if "norm" not in part))]
    return norms, matrices + ([] if tied else [w["lm_head.weight"]])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_versions(version: int, tied: bool, tmp_path: Path) -> None:
    w = weights(tied)
    norms, matrices = split(w, tied)
    if version == 0:
        blob = version0(w, tied)
    elif version == 1:
        blob = header(1, tied) + b"".join(a.tobytes() for a in norms + matrices)
    else:
        blob = header(2, tied) + b"".join(a.tobytes() for a in norms)
        for matrix in matrices:
            scale = (abs(matrix.reshape(-1, GROUP)).max(1) / 127).astype(np.float32)
            codes = np.round(matrix.reshape(-1, GROUP) / scale[:, None]).astype(np.int8)
            matrix[...] = (codes.astype(np.float32) * scale[:, None]).reshape(matrix.shape)
            blob += codes.tobytes() + scale.tobytes()
    source = open_source(write(tmp_path / "stories.bin", blob))
    assert source.format == "l2c"
    assert set(source.tensors) == set(w)
    for name, array in w.items():
        np.testing.assert_array_equal(source.read(name), array)
        assert source.tensors[name].shape == array.shape
    config = source.config
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (DIM, HIDDEN, LAYERS)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]) == (HEADS, KV, VOCAB)
    assert config["tie_word_embeddings"] is tied
    assert config["rope_interleaved"] is True
    assert config["model_type"]
    if version == 2:
        with pytest.raises(UnsupportedError):
            source.raw("model.embed_tokens.weight")
    else:
        assert source.raw("model.norm.weight").size == 4 * DIM


@pytest.mark.parametrize("version", [0, 1])
def test_wrong_sizes_are_refused(version: int, tmp_path: Path) -> None:
    w = weights(True)
    norms, matrices = split(w, True)
    blob = version0(w, True) if version == 0 else header(1, True) + b"".join(a.tobytes() for a in norms + matrices)
    changed = [blob[:-1], blob + b"\0", blob[: len(blob) // 2], blob[:20]]
    start = 0 if version == 0 else 8
    for field in range(6):
        for value in (0, -1, 3, 2**31 - 1):
            at = start + 4 * field
            changed.append(blob[:at] + struct.pack("<i", value) + blob[at + 4 :])
    changed.append(struct.pack("<Ii", 0x616B3432, 7) + blob[8:])
    for data in changed:
        with pytest.raises(CheckpointError):
            open_source(write(tmp_path / "m.bin", data))
