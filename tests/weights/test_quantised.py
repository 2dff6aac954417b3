"""Quantised directories: what is written loads as it was, by mapping; anything else is refused at the door."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from inferflow.errors import ArgumentError, CheckpointError, InferflowError
from inferflow.llm import LLM
from inferflow.runtime.model import Model, load_model
from inferflow.runtime.quantise import Report, quantise_model, uncalibrated
from inferflow.spec.document import parse_toml
from inferflow.spec.library import find_spec, for_gguf, list_specs, load_spec, plain
from inferflow.spec.write import spec_text
from inferflow.text import load_tokenizer
from inferflow.weights.open import open_source
from inferflow.weights.safetensors_write import SafetensorsWriter
from tests import tiny

WIDE = {**tiny.CONFIG, "hidden_size": 128, "intermediate_size": 200, "vocab_size": 256, "tie_word_embeddings": True}


def checkpoint(path: Path, config: dict[str, Any] = WIDE) -> Path:
    weights = {k: v for k, v in tiny.tensors(config).items() if k != "lm_head.weight"}
    return tiny.write(path, config, weights)


def quantised(model: Model, out: Path, force: bool = False) -> Report:
    return quantise_model(model, out, lambda keys: uncalibrated(model, keys, 64), force=force)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    model = load_model(checkpoint(folder / "m"), quant="q3.5,attn_q=q8,attn_k=bf16,ffn_up=q3")
    quantised(model, folder / "q")
    return folder / "q"


def gguf(path: Path, vocabulary: bool = True) -> Path:
    """The tiny model as GGUF, in blocks of several types, with a byte-level vocabulary."""
    config = {**WIDE, "hidden_size": 256, "intermediate_size": 512}
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
             "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers.": "blk."}  # fmt: skip
    kinds = {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q5_1", "ffn_up": "Q5_0", "token_embd": "Q8_0"}
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(96)
    for name, value in (("embedding_length", 256), ("feed_forward_length", 512), ("block_count", 2), ("head_count", 4)):
        getattr(writer, f"add_{name}")(value)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if vocabulary:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        tokens = ["<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "ab", "Ġa", *(f"x{n}" for n in range(157))]
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
        writer.add_token_merges(["a b", "Ġ a"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{% for m in messages %}<s>{{ m.content }}{% endfor %}")
    for name, array in tiny.tensors(config).items():
        for old, new in names.items():
            name = name.replace(old, new)
        kind = next((kind for role, kind in kinds.items() if role in name), None)
        if "lm_head" in name:
            continue
        if kind is None:
            writer.add_tensor(name, array.astype(np.float32))
        else:
            numbered = GGMLQuantizationType[kind]
            writer.add_tensor(name, quants.quantize(array, numbered), raw_dtype=numbered)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ------------------------------------------------------------------------------------------------ what is written


def test_it_loads_as_it_was_quantised(made: Path) -> None:
    original = load_model(made.parent / "m", quant="q3.5,attn_q=q8,attn_k=bf16,ffn_up=q3")
    loaded = load_model(made)
    assert loaded.source.format == "inferflow"
    assert loaded.spec.name == original.spec.name
    assert loaded.graph.nodes == original.graph.nodes
    assert set(loaded.weights.formats.values()) == {"keep"}
    for key, format_ in original.weights.formats.items():
        stored, before = loaded.weights.stored(key), original.weights.stored(key)
        assert (stored.format, stored.shape, stored.rotation) == (before.format, before.shape, before.rotation)
        assert stored.format == format_
        np.testing.assert_array_equal(stored.codes, before.codes)
        np.testing.assert_array_equal(loaded.weights.array(key), original.weights.array(key))
        mapped = stored.codes
        while isinstance(mapped.base, np.ndarray):
            mapped = mapped.base
        assert not stored.codes.flags.owndata
        assert not stored.codes.flags.writeable
    for key in original.graph.weights.keys() - original.weights.formats.keys():
        np.testing.assert_array_equal(loaded.weights.array(key), original.weights.array(key))
    assert loaded.weights.stored("output.weight") is loaded.weights.stored("token_embd.weight")
    assert loaded.parameters == original.parameters


def test_the_answers_are_the_quantised_models(made: Path) -> None:
    ids = [3, 17, 200, 9, 45]
    with (
        LLM(made, engine="reference") as one,
        LLM(made.parent / "m", quant="q3.5,attn_q=q8,attn_k=bf16,ffn_up=q3", engine="reference") as other,
    ):
        np.testing.assert_array_equal(one.logits(ids), other.logits(ids))


def test_what_is_in_the_directory(made: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    table = config["quantization_config"]
    assert {key: config[key] for key in WIDE} == WIDE
    assert (table["quant_method"], table["version"], table["spec"]) == ("inferflow", 1, "llama")
    assert table["tensors"]["layers.0.attn_v.weight"] == {"format": "q4", "shape": [64, 128], "rotation": 64}
    assert table["tensors"]["layers.0.ffn_down.weight"]["rotation"] == 64
    assert table["aliases"] == {"output.weight": "token_embd.weight"}
    with safe_open(made / "model.safetensors", "numpy") as file:
        assert file.get_slice("layers.0.ffn_down.weight.codes").get_shape() == [8, 4, 448]
        assert "layers.0.attn_norm.weight" in file.keys()  # noqa: SIM118
    header = json.loads((made / "model.safetensors").read_bytes()[8:].split(b"   ")[0])
    starts = {name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    start = int.from_bytes((made / "model.safetensors").read_bytes()[:8], "little") + 8
    assert all((start + at) % 64 == 0 for name, at in starts.items() if name.endswith((".codes", ".rows")))
    assert all((start + at) % 16 == 0 for name, at in starts.items() if name.endswith(".scales"))
    assert not [p for p in made.parent.iterdir() if p.name.startswith(".")]


def test_the_report_adds_up(tmp_path: Path) -> None:
    model = load_model(checkpoint(tmp_path / "m"), quant="q4")
    seen: list[tuple[int, int]] = []
    report = quantise_model(
        model, tmp_path / "q", lambda keys: uncalibrated(model, keys, 0), progress=lambda _, *n: seen.append(n)
    )
    assert report.weights == model.parameters == seen[-1][0] == seen[-1][1]
    assert sum(size for _, size in report.formats.values()) <= report.bytes
    assert report.bits_per_weight == pytest.approx(8 * report.bytes / report.weights)
    assert report.formats["q4"][0] == 15
    assert load_model(tmp_path / "q").weights.stored("layers.0.ffn_up.weight").rotation == 0


def test_a_gguf_keeps_its_blocks_its_config_and_its_tokenizer(tmp_path: Path) -> None:
    model = load_model(gguf(tmp_path / "m.gguf"), quant="keep,ffn_down=q4")
    quantised(model, tmp_path / "q")
    loaded = load_model(tmp_path / "q")
    assert loaded.graph.nodes == model.graph.nodes
    formats = {key: loaded.weights.stored(key).format for key in loaded.weights.formats}
    assert formats["layers.1.attn_q.weight"] == "keep4"
    assert formats["layers.1.attn_v.weight"] == "keep7"
    assert formats["layers.1.ffn_up.weight"] == formats["output.weight"] == "keep8"
    assert formats["layers.0.ffn_down.weight"] == "q4"
    for key in model.graph.weights:
        np.testing.assert_array_equal(loaded.weights.array(key), model.weights.array(key))
    assert dict(loaded.config) | {"quantization_config": 0} == dict(model.config) | {"quantization_config": 0}
    one, other = (load_tokenizer(m.source, m.source.path) for m in (loaded, model))
    assert one is not None
    assert other is not None
    for text in ("ab a<s>b ~!", " a ab", "</s>é"):
        assert one.encode(text) == other.encode(text)
        assert one.encode(text, parse_special=True) == other.encode(text, parse_special=True)
    assert (one.eos_ids, one.bos_id, one.chat_template) == (other.eos_ids, other.bos_id, other.chat_template)


def test_a_real_tokenizer_goes_along_exactly(smollm2_path: Path, tmp_path: Path) -> None:
    model = load_model(smollm2_path)
    (tmp_path / "tokenizer.gguf").write_bytes(model.source.vocabulary())  # type: ignore[attr-defined]
    from inferflow.weights.files import map_file
    from inferflow.weights.gguf_header import parse_header

    header = parse_header(map_file(tmp_path / "tokenizer.gguf"), tmp_path)
    assert header.tensors == []
    assert header.metadata.keys() == model.source.metadata.keys()
    for key, value in model.source.metadata.items():
        same = header.metadata[key]
        assert list(same) == list(value) if hasattr(value, "__len__") else same == value


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE"):
        (folder / name).write_text(name)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    quantised(load_model(folder, quant="q4"), tmp_path / "q")
    assert (tmp_path / "q" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert (tmp_path / "q" / "LICENSE").read_text() == "LICENSE"
    assert load_model(tmp_path / "q").config["generation"] == {"eos_token_id": [5, 6]}
    assert "generation" not in json.loads((tmp_path / "q" / "config.json").read_text())


def test_every_shipped_spec_can_be_written_whole() -> None:
    for name in list_specs():
        spec = load_spec(name)
        for applied in (spec, for_gguf(spec)):
            back = plain(parse_toml(spec_text(applied, []), "spec.toml"))
            assert back.pop("block") == plain(applied.blocks)
            for key, node in applied.tree.items():
                if key not in ("tensors", "gguf") and "has(" not in str(plain(node)):
                    assert back[key] == plain(node)
            assert "has(" not in spec_text(applied, [])


def test_has_is_answered_and_the_rest_is_text(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        'extends = "decoder"\n[let]\na = "has(\'x\') and not has( \\"y\\" )"\n"b c" = "\'\\u007f\\\\ \\"é\\"\'"\nn = 1e-6\n'
        "t = [1, 2.5, true, { if = \"has('x')\" }]\n"
    )
    text = spec_text(load_spec(path), ["x"])
    let = plain(parse_toml(text, "spec.toml").table("let"))
    assert let["a"] == "True and not False"
    assert let["b c"] == "'\x7f\\ \"é\"'"
    assert (let["n"], let["t"]) == (1e-6, [1, 2.5, True, {"if": "True"}])
    path.write_text('extends = "decoder"\n[let]\na = "has(d)"\n')
    with pytest.raises(InferflowError, match="computed name"):
        spec_text(load_spec(path), [])


def test_the_writer_keeps_the_format(tmp_path: Path) -> None:
    arrays = {
        "odd": np.arange(5, dtype=np.float16), "wide": np.arange(3, dtype=np.float32), "bits": np.arange(7, dtype=np.uint8),
        "whole": np.arange(64, dtype=np.uint8).reshape(2, 32), "empty": np.zeros((0, 4), np.float32),
    }  # fmt: skip
    with SafetensorsWriter(tmp_path / "x.safetensors", list(arrays)) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype


# ------------------------------------------------------------------------------------------------ what is refused


def test_what_is_there_is_not_overwritten(made: Path, tmp_path: Path) -> None:
    model = load_model(made.parent / "m", quant="q8")
    out = tmp_path / "q"
    shutil.copytree(made, out)
    with pytest.raises(ArgumentError, match="is there already"):
        quantised(model, out)
    assert quantised(model, out, force=True).formats.keys() == {"q8", "f32", "bf16"} & {"q8", "f32"}
    for other in (made.parent / "m", tmp_path):
        with pytest.raises(ArgumentError, match="is no directory that 'inferflow quantize' made"):
            quantised(model, other, force=True)
    assert (made.parent / "m" / "model.safetensors").is_file()
    (tmp_path / "empty").mkdir()
    quantised(model, tmp_path / "empty")
    with pytest.raises(ArgumentError, match="there is no directory"):
        quantised(model, tmp_path / "no" / "q")


def test_nothing_is_left_when_it_fails(tmp_path: Path) -> None:
    weights = {k: v for k, v in tiny.tensors(WIDE).items() if k != "lm_head.weight"}
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = np.nan
    model = load_model(tiny.write(tmp_path / "m", WIDE, weights), quant="q4")
    with pytest.raises(CheckpointError, match="not finite"):
        quantised(model, tmp_path / "q")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_a_copy_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    model = load_model(checkpoint(tmp_path / "m"), quant=tmp_path / "empty.toml")
    with pytest.raises(ArgumentError, match="no matrix would get another format"):
        quantised(model, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_it_is_not_quantised_twice(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="quantised already"):
        load_model(made, quant="q4")
    with pytest.raises(ArgumentError, match="quantised already"):
        quantised(load_model(made), tmp_path / "q")


Change = Callable[[dict[str, Any]], None]
KEY = "layers.0.attn_v.weight"


def entry(**changes: Any) -> Change:
    return lambda table: table["tensors"][KEY].update(changes)


CONFIGS: dict[str, tuple[Change, str]] = {
    "newer": (lambda t: t.update(version=2), "upgrade Inferflow"),
    "older": (lambda t: t.update(version="one"), "version one"),
    "version true": (lambda t: t.update(version=True), "version True"),
    "version 1.0": (lambda t: t.update(version=1.0), "version 1.0"),
    "no version": (lambda t: t.pop("version"), "version"),
    "no table": (lambda t: t.update(tensors=[]), "is no table"),
    "aliases": (lambda t: t.update(aliases=7), "is no table"),
    "alias of nothing": (lambda t: t["aliases"].update({"output.weight": "none"}), "which cannot be"),
    "alias of a list": (lambda t: t["aliases"].update({"output.weight": [1]}), "which cannot be"),
    "alias of what is there": (lambda t: t["aliases"].update({KEY: "token_embd.weight"}), "which cannot be"),
    "format": (entry(format="q5"), "format is q5"),
    "float format": (entry(format="f32"), "format is f32"),
    "format number": (entry(format=3), "format is 3"),
    "other format": (entry(format="q3.5"), "must be U8"),
    "entry": (lambda t: t["tensors"].update({KEY: "q4"}), "form is q4"),
    "rows": (entry(shape=[65, 128]), "must be U8"),
    "columns": (entry(shape=[64, 256]), "must be U8"),
    "huge": (entry(shape=[1 << 39, 1 << 39]), "must be U8"),
    "beyond": (entry(shape=[10**400, 1]), "shape is"),
    "negative": (entry(shape=[-64, 128]), "shape is"),
    "one axis": (entry(shape=[64]), "shape is"),
    "bool": (entry(shape=[True, 128]), "shape is"),
    "text": (entry(shape="64"), "shape is 64"),
    "rotation": (entry(rotation=48), "rotation is 48"),
    "rotation too wide": (entry(rotation=256), "rotation is 256"),
    "negative rotation": (entry(rotation=-64), "rotation is -64"),
    "huge rotation": (entry(rotation=10**30), "rotation is a huge number"),
    "group": (entry(group=32), "groups are 32 wide"),
    "zero group": (entry(group=0), "groups are 0 wide"),
    "minima": (entry(mins=True), "minima are"),
    "kept": (entry(format="keep4", group=32, rotation=0), "must be U8"),
    "kept columns": (
        entry(format="keep8", group=32, rotation=0, shape=[64, 127]),
        "columns are not whole groups of 32",
    ),
    "rotated kept": (entry(format="keep4", group=32), "rotation is 64"),
    "more": (lambda t: t["tensors"].update({"none": {"format": "q4", "shape": [16, 64]}}), "there is nothing"),
    "left out": (lambda t: t["tensors"].pop(KEY), "has no tensor in"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_does_not_go_with_the_weights(name: str, made: Path, tmp_path: Path) -> None:
    change, said = CONFIGS[name]
    bad = tmp_path / "q"
    shutil.copytree(made, bad)
    config = json.loads((bad / "config.json").read_text())
    change(config["quantization_config"])
    (bad / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_model(bad)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 2500


def rewritten(bad: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    arrays = load_torch(bad / "model.safetensors")
    change(arrays)
    save_torch(arrays, bad / "model.safetensors")


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "codes gone": (lambda p: rewritten(p, lambda a: a.pop(f"{KEY}.codes")), "there is nothing"),
    "norm gone": (lambda p: rewritten(p, lambda a: a.pop("output_norm.weight")), "'output_norm.weight' has no tensor"),
    "one more": (lambda p: rewritten(p, lambda a: a.update(x=torch.zeros(3))), "tensor 'x'"),
    "twice": (lambda p: rewritten(p, lambda a: a.update({KEY: torch.zeros(64, 128)})), "twice"),
    "type": (
        lambda p: rewritten(p, lambda a: a.update({f"{KEY}.rows": a[f"{KEY}.rows"].half()})), "there is F16",
    ),
    "norm of integers": (
        lambda p: rewritten(p, lambda a: a.update({"output_norm.weight": torch.ones(128, dtype=torch.int16)})),
        "'output_norm.weight' is I16, and can be F32, F16 or BF16",
    ),
    "weights gone": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors: is missing"),
    "no spec": (lambda p: (p / "spec.toml").unlink(), "is missing"),
    "no toml": (lambda p: (p / "spec.toml").write_text("[["), "not valid TOML"),
    "another spec": (lambda p: (p / "spec.toml").write_text(spec_text(find_spec({"model_type": "gpt2"}), [])), ""),
    "cut short": (lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-9]), "cut short"),
    "no weights but a vocabulary": (
        lambda p: (p / "model.safetensors").rename(p / "tokenizer.gguf"), "model.safetensors: is missing",
    ),
    "vocabulary": (lambda p: (p / "tokenizer.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(5)), "cut short"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_not_of_one_model(name: str, made: Path, tmp_path: Path) -> None:
    change, said = FILES[name]
    bad = tmp_path / "q"
    shutil.copytree(made, bad)
    change(bad)
    with pytest.raises(InferflowError) as caught:
        load_model(bad)
    assert said in str(caught.value)


def test_the_file_alone_opens_as_the_directory(made: Path) -> None:
    assert open_source(made / "model.safetensors").tensors.keys() == open_source(made).tensors.keys()
    assert load_model(made / "model.safetensors").spec.name == "llama"
