"""Corrupt and incomplete checkpoints through the command line: status 1, one sentence that names the file and the remedy,
no traceback, nothing on stdout, and nothing executed."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from inferflow.cli.main import main
from tests.tiny import CONFIG, tensors, write
from tests.weights.craft import Touch, torch_zip
from tests.weights.test_hostile import DIRECTORIES, GGUFS, IMPOSTORS, PICKLES, SAFETENSORS

Capture = pytest.CaptureFixture[str]
FILES = {
    **{f"safetensors: {name}": ("model.safetensors", data) for name, (data, _) in SAFETENSORS.items()},
    **{f"gguf: {name}": ("model.gguf", data) for name, (data, _) in GGUFS.items()},
    **{f"pickle: {name}": ("pytorch_model.bin", data) for name, (data, _) in PICKLES.items()},
    **{f"impostor: {name}": ("model.safetensors", data) for name, (data, _) in IMPOSTORS.items()},
}


def refused(capsys: Capture, *arguments: str) -> str:
    """What ``inferflow ARGUMENTS`` says as it refuses."""
    with pytest.raises(SystemExit) as done:
        main(list(arguments))
    seen = capsys.readouterr()
    assert done.value.code == 1, seen
    assert seen.out == ""
    lines = seen.err.rstrip("\n").split("\n")
    assert all(line.startswith("  ") for line in lines[1:]), seen.err
    assert lines[0].startswith("error: ")
    assert lines[0].endswith(")"), "no remedy"
    assert max(map(len, lines)) < 4100
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "data"), FILES.values(), ids=FILES.keys())
def test_corrupt_file(name: str, data: bytes, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(data)
    assert name in refused(capsys, "info", str(tmp_path / name))
    assert str(tmp_path) in refused(capsys, "generate", "x", "-m", str(tmp_path))


@pytest.mark.parametrize("contents", [contents for contents, _ in DIRECTORIES.values()], ids=DIRECTORIES.keys())
def test_corrupt_directory(contents: dict[str, bytes | str], tmp_path: Path, capsys: Capture) -> None:
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    assert str(tmp_path) in refused(capsys, "info", str(tmp_path))


# ------------------------------------------------------------------------------------------------ sound, but not the model


def without(*names: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in tensors().items() if name not in names}


def config(**keys: Any) -> dict[str, Any]:
    changed = {**CONFIG, **keys}
    return {key: value for key, value in changed.items() if value is not ...}


LAYER = "model.layers.1."
# name -> (config, tensors, part of what is said)
WRONG: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
    "no model_type": (config(model_type=...), tensors(), "model_type"),
    "model_type is a list": (config(model_type=["llama"]), tensors(), "model_type"),
    "unknown model_type": (config(model_type="nothing"), tensors(), "no shipped spec serves model_type 'nothing'"),
    "no width": (config(hidden_size=...), tensors(), "missing"),
    "width is a word": (config(hidden_size="wide"), tensors(), "'wide'"),
    "width is null": (config(hidden_size=None), tensors(), "missing"),
    "width is negative": (config(hidden_size=-32), tensors(), "-32"),
    "width is zero": (config(hidden_size=0), tensors(), "0"),
    "width is half": (config(hidden_size=16), tensors(), "[vocab=67, d=16]"),
    "width is a list": (config(hidden_size=[32]), tensors(), "[32]"),
    "width of 400 digits": (config(hidden_size=10**400), tensors(), "64 bits"),
    "heads do not divide": (config(num_attention_heads=3), tensors(), "do not fit"),
    "no heads": (config(num_attention_heads=0), tensors(), "zero"),
    "kv heads do not divide": (config(num_key_value_heads=3), tensors(), "heads"),
    "more kv heads than heads": (config(num_key_value_heads=8), tensors(), "heads"),
    "vocabulary too small": (config(vocab_size=66), tensors(), "vocab=66"),
    "vocabulary too large": (config(vocab_size=68), tensors(), "vocab=68"),
    "vocabulary of 2**40": (config(vocab_size=1 << 40), tensors(), "1099511627776"),
    "one layer too many": (config(num_hidden_layers=3), tensors(), "layer 2"),
    "4096 layers": (config(num_hidden_layers=4096), tensors(), "too much work"),
    "10**9 layers": (config(num_hidden_layers=10**9), tensors(), "1 to 4096"),
    "no layers": (config(num_hidden_layers=0), tensors(), "count is 0"),
    "layers are text": (config(num_hidden_layers="2"), tensors(), "count is '2'"),
    "activation unknown": (config(hidden_act="gloo"), tensors(), "gloo"),
    "activation is a number": (config(hidden_act=3), tensors(), "3"),
    "epsilon is negative": (config(rms_norm_eps=-1.0), tensors(), "eps is -1.0"),
    "epsilon is a word": (config(rms_norm_eps="x"), tensors(), "'x'"),
    "theta is a word": (config(rope_theta="x"), tensors(), "theta"),
    "rope kind unknown": (config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), tensors(), "spiral"),
    "rope scaling is a word": (config(rope_scaling="x"), tensors(), "'x'"),
    "bias is a word": (config(attention_bias="yes"), tensors(), "bias"),
    "no embedding": (CONFIG, without("model.embed_tokens.weight"), "token_embd"),
    "no head, untied": (CONFIG, without("lm_head.weight"), "lm_head"),
    "no last norm": (CONFIG, without("model.norm.weight"), "output_norm"),
    "no tensor of a layer": (CONFIG, without(LAYER + "mlp.up_proj.weight"), "ffn_up"),
    "an extra tensor": (CONFIG, {**tensors(), "extra.weight": np.zeros(3, np.float32)}, "extra.weight"),
    "a bias nobody wants": (
        CONFIG,
        {**tensors(), LAYER + "self_attn.q_proj.bias": np.zeros(32, np.float32)},
        "q_proj.bias",
    ),
    "a norm too long": (CONFIG, {**tensors(), "model.norm.weight": np.ones(33, np.float32)}, "[33]"),
    "a matrix transposed": (CONFIG, {**tensors(), LAYER + "mlp.up_proj.weight": np.zeros((32, 48), np.float32)}, "[32, 48]"),
    "a matrix flat": (CONFIG, {**tensors(), LAYER + "mlp.up_proj.weight": np.zeros(32 * 48, np.float32)}, "[1536]"),
    "an empty matrix": (CONFIG, {**tensors(), LAYER + "mlp.up_proj.weight": np.zeros((0, 32), np.float32)}, "[0, 32]"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "weights", "words"), WRONG.values(), ids=WRONG.keys())
def test_checkpoint_that_is_not_the_model(
    settings: dict[str, Any], weights: dict[str, np.ndarray], words: str, tmp_path: Path, capsys: Capture
) -> None:
    write(tmp_path, settings, weights)
    line = refused(capsys, "info", str(tmp_path))
    assert words in line
    if not isinstance(settings.get("model_type"), str) or settings["model_type"] == "nothing":
        assert "config.json" in line
    else:
        assert ".toml:" in line or str(tmp_path) in line


TOKENIZERS: dict[str, tuple[str, str]] = {
    "no JSON": ("tokenizer.json", "nothing"),
    "empty": ("tokenizer.json", ""),
    "an object of nothing": ("tokenizer.json", "{}"),
    "an unknown model": ("tokenizer.json", json.dumps({"version": "1.0", "model": {"type": "Magic", "vocab": {}}})),
    "a pointer": ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n"),
}


@pytest.mark.parametrize(("name", "text"), TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_broken_tokenizer(name: str, text: str, tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path)
    (tmp_path / name).write_text(text)
    assert name in refused(capsys, "info", str(tmp_path))
    assert name in refused(capsys, "generate", "x", "-m", str(tmp_path))


def attack(folder: Path, name: str, protocol: int, shape: Callable[[Any], Any]) -> Path:
    marker = folder / "marker"
    (folder / name).write_bytes(torch_zip(pickle.dumps(shape(Touch(marker)), protocol), {"0": bytes(24)}))
    return marker


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("shape", [lambda t: t, lambda t: {"w": t}, lambda t: [t]], ids=["bare", "dict", "list"])
def test_nothing_in_a_pickle_runs(protocol: int, shape: Callable[[Any], Any], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "evil.Model"}}))
    (tmp_path / "evil.py").write_text("raise SystemExit")
    marker = attack(tmp_path, "pytorch_model.bin", protocol, shape)
    assert "pytorch_model.bin" in refused(capsys, "info", str(tmp_path))
    assert "pytorch_model.bin" in refused(capsys, "generate", "x", "-m", str(tmp_path / "pytorch_model.bin"))
    assert not marker.exists()


def test_the_same_checkpoint_whole_is_served(tmp_path: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as done:
        main(["info", str(write(tmp_path)) + "/"])
    assert done.value.code == 0
    assert "safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("tie", [True, False, None, ...], ids=str)
@pytest.mark.parametrize("head", [True, False], ids=["head", "no head"])
def test_tied_and_untied_heads(tie: Any, head: bool, tmp_path: Path, capsys: Capture) -> None:
    """The config decides; where it is silent, a head that is there is used, and one that is not is the embedding."""
    folder = tmp_path / "model"
    write(folder, config(tie_word_embeddings=tie), tensors() if head else without("lm_head.weight"))
    if tie is False and not head:
        assert "lm_head" in refused(capsys, "info", str(folder))
        return
    from inferflow import LLM

    with LLM(folder) as llm:
        got, warnings = llm.logits([3, 4]), llm.model.weights.warnings
    table = "lm_head.weight" if head and tie is not True else "model.embed_tokens.weight"
    with LLM(write(tmp_path / "want", CONFIG, {**tensors(), "lm_head.weight": tensors()[table]})) as llm:
        np.testing.assert_array_equal(got, llm.logits([3, 4]))
    assert [w for w in warnings if "lm_head" in w] if head and tie is True else not warnings


def test_one_checkpoint_in_shards(tmp_path: Path) -> None:
    from inferflow import LLM

    with LLM(write(tmp_path / "one")) as llm:
        want = llm.logits([3, 4, 5])
    shards, whole = tmp_path / "shards", tensors()
    shards.mkdir()
    (shards / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(whole)
    where = {name: f"model-{n % 3 + 1:05d}-of-00003.safetensors" for n, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: whole[name] for name in names if where[name] == file}, shards / file)
    with LLM(shards) as llm:  # the names of the files say that they belong together
        np.testing.assert_array_equal(llm.logits([3, 4, 5]), want)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with LLM(shards) as llm:
        np.testing.assert_array_equal(llm.logits([3, 4, 5]), want)


def test_names_in_a_file_cannot_write_to_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    evil = "a\nerror: b\x1b[31m\u202e"
    write(tmp_path, CONFIG, {**tensors(), evil: np.zeros(1, np.float32), "x" * 60_000: np.zeros(1, np.float32)})
    assert "a\\nerror: b\\x1b[31m\\u202e" in refused(capsys, "info", str(tmp_path))
    write(tmp_path, CONFIG, {**tensors(), "model.layers.7.\x1b[2J": np.zeros(1, np.float32)})
    with pytest.raises(SystemExit):
        main(["info", "--tensors", str(tmp_path)])
    assert "\x1b" not in capsys.readouterr().out


def test_what_is_meant_is_found_soon_among_many_tensors(tmp_path: Path, capsys: Capture) -> None:
    names = [f"model.layers.{n}.self_attn.{p}_projection.weight" for n in range(1000) for p in "qkvo"]
    write(tmp_path, CONFIG, dict.fromkeys(names, np.zeros((32, 32), np.float16)))
    start = time.process_time()
    assert "did you mean 'model.layers.0.self_attn.q_projection.weight'?" in refused(capsys, "info", str(tmp_path))
    assert time.process_time() - start < 5
