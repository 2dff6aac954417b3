"""Names to tensors: alternatives, conditions, prefixes, stacks of experts and heads, junk, and what is told about the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from inferflow.errors import CheckpointError, SpecError
from inferflow.runtime.model import Model, load_model
from inferflow.weights.problems import pattern

from .tiny import CONFIG, check_problems, tensors, write_checkpoint

LAYER = "model.layers.{}."


def rng(*shape: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def load(folder: Path, text: str = "", config: dict[str, Any] | None = None, **stored: Any) -> Model:
    spec = folder / "own.toml"
    spec.write_text('extends = "decoder"\n' + text, "utf-8")
    return load_model(write_checkpoint(folder / "model", {**CONFIG, **(config or {})}, **stored), spec)


def test_every_weight_is_the_stored_tensor(tmp_path: Path) -> None:
    model = load(tmp_path)
    np.testing.assert_array_equal(
        model.weights.array("layers.1.ffn_up.weight"), tensors()["model.layers.1.mlp.up_proj.weight"]
    )
    assert model.weights.warnings == []
    assert model.parameters == sum(a.size for a in tensors().values())


def test_the_first_alternative_that_is_there(tmp_path: Path) -> None:
    mine = {"mine.weight": rng(16, 8)}
    text = '[tensors]\noutput = [{ from = "never", if = "False" }, "absent", "mine", "lm_head"]\nignore = ["lm_*"]\n'
    model = load(tmp_path, text, **mine)
    np.testing.assert_array_equal(model.weights.array("output.weight"), mine["mine.weight"])


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    model = load(tmp_path, config={"tie_word_embeddings": True})
    assert model.weights.plans["output.weight"].names == model.weights.plans["token_embd.weight"].names
    assert model.weights.array("output.weight") is model.weights.array("token_embd.weight")
    assert any("ties the output" in warning for warning in model.weights.warnings)


def test_prefixes_and_junk(tmp_path: Path) -> None:
    stored: dict[str, Any] = {f"outer.{name}": a for name, a in tensors().items()}
    stored |= dict.fromkeys(tensors())
    stored |= {"outer.model.layers.0.self_attn.rotary_emb.inv_freq": rng(1), "vision.a": rng(2)}
    model = load(tmp_path, '[match]\nprefix = ["", "outer."]\n[tensors]\nignore = ["vision.*"]\n', **stored)
    assert model.weights.plans["layers.0.attn_q.weight"].names == ("outer.model.layers.0.self_attn.q_proj.weight",)


def test_experts_and_heads_are_stacked(tmp_path: Path) -> None:
    up = {f"model.layers.{i}.mlp.{e}.up.weight": rng(6, 8, seed=10 * i + e) for i in range(2) for e in range(3)}
    more = {
        f"model.layers.{i}.mlp.{e}.{p}.weight": rng(*s)
        for i in range(2)
        for e in range(3)
        for p, s in (("gate", (6, 8)), ("down", (8, 6)))
    }
    more |= {f"model.layers.{i}.mlp.router.weight": rng(3, 8) for i in range(2)}
    more |= {f"model.layers.{i}.heads.{h}.weight": rng(2, seed=h) for i in range(2) for h in range(4)}
    gone = {f"model.layers.{i}.mlp.{p}_proj.weight": None for i in range(2) for p in ("gate", "up", "down")}
    text = """
[layers]
flow = ["h = attn_norm(x)", "x += attn(h) + merge(head_norm(heads(h, H)))", "x += ffn(ffn_norm(x))"]
[layers.head_norm]
per_head = true
[layers.ffn]
block = "moe"
experts = 3
width = 6
act = "silu"
top_k = 1
[tensors.layers]
head_norm = "model.layers.{i}.heads.{h}"
ffn_gate_inp = "model.layers.{i}.mlp.router"
ffn_up_exps = "model.layers.{i}.mlp.{e}.up"
ffn_gate_exps = "model.layers.{i}.mlp.{e}.gate"
ffn_down_exps = "model.layers.{i}.mlp.{e}.down"
"""
    model = load(tmp_path, text, **up, **more, **gone)
    got = model.weights.array("layers.1.ffn_up_exps.weight")
    np.testing.assert_array_equal(got, np.stack([up[f"model.layers.1.mlp.{e}.up.weight"] for e in range(3)]))
    assert model.weights.array("layers.0.head_norm.weight").shape == (4, 2)
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.3.up.weight' is not in") as caught:
        load(
            tmp_path,
            text.replace("experts = 3", "experts = 4"),
            **up,
            **{**more, "model.layers.0.mlp.router.weight": rng(4, 8)},
            **gone,
        )
    assert "number of experts" in str(caught.value)


def test_two_weights_of_one_tensor_are_two(tmp_path: Path) -> None:
    """What is kept is told apart by all that the transform says: the part, the sizes, the value and its layer."""
    text = """
[layers.attn_norm]
bias = true
[layers.ffn_norm]
bias = true
[tensors.layers]
"attn_norm.weight" = { from = "one", value = "w + i" }
"attn_norm.bias" = { from = "one", value = "w * 2" }
"ffn_norm.weight" = { from = "one", axes = "part", split = "part", sizes = [8] }
"ffn_norm.bias" = { from = "one" }
"""
    gone = {
        LAYER.format(i) + name + ".weight": None
        for i in range(2)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    one = rng(8)
    weights = load(tmp_path, text, one=one, **gone).weights
    for i in range(2):
        np.testing.assert_array_equal(weights.array(f"layers.{i}.attn_norm.weight"), one + np.float32(i))
        np.testing.assert_array_equal(weights.array(f"layers.{i}.attn_norm.bias"), one * 2)
        np.testing.assert_array_equal(weights.array(f"layers.{i}.ffn_norm.weight"), one)


def test_layers_beyond_the_config_are_told_and_ignored(tmp_path: Path) -> None:
    model = load(tmp_path, config={"num_hidden_layers": 1}, **{n: a for n, a in tensors().items() if ".1." in n})
    assert model.weights.warnings == ["left out: 9 tensors of layers >= 1 ('model.layers.1' …)"]
    assert check_problems(tmp_path / "own.toml", tmp_path / "model") == []


def test_numbers_that_are_no_layers_of_the_model_leave_nothing_out(tmp_path: Path) -> None:
    """An encoder's layers, or an expert of a layer that is there, are not layers beyond the last."""
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, **{"vision.layers.7.a.weight": rng(2), "model.layers.0.mlp.7.up.weight": rng(2)})
    assert "'vision.layers.7.a.weight' [2] is used by no part" in str(caught.value)
    assert "'model.layers.0.mlp.7.up.weight' [2] is used by no part" in str(caught.value)


def test_missing_tensors_are_told_once_with_the_like_of_them(tmp_path: Path) -> None:
    gone = {LAYER.format(i) + "mlp.up_proj.weight": None for i in range(2)}
    there = {LAYER.format(i) + "mlp.up_project.weight": rng(12, 8) for i in range(2)}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, **gone, **there)
    text = str(caught.value)
    assert text.count("has no tensor in") == 1
    assert "nor has 1 other layer)" in text
    assert "did you mean 'model.layers.0.mlp.up_project.weight'?" in text
    assert "is used by no part" not in text


def test_unused_tensors_are_told_once_a_pattern(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, **{LAYER.format(i) + "extra.weight": rng(3) for i in range(2)}, other=rng(4))
    text = str(caught.value)
    assert "'model.layers.0.extra.weight' [3] and 1 like it are used by no part" in text
    assert "'other' [4] is used by no part" in text


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    gone = {name: None for name in tensors() if ".1." in name}
    with pytest.raises(CheckpointError, match="layer 1 of 'layers' lacks all its tensors in") as caught:
        load(tmp_path, **gone)
    assert "counts more layers" in caught.value.fix


def test_which_layers_are_gone(tmp_path: Path) -> None:
    """Those of which nothing is there, and no others: a layer that lacks some tensors is told by the names of these."""
    config = {**CONFIG, "num_hidden_layers": 8}
    gone = {n: None for n in tensors(config) if n.split(".")[2:3] and n.split(".")[2] in ("0", "3", "4", "5", "7")}
    some = {f"model.layers.{i}.mlp.{p}_proj.weight": None for i in (1, 2) for p in ("up", "down")}
    write_checkpoint(tmp_path / "model", config, **gone, **some)
    (tmp_path / "own.toml").write_text('extends = "decoder"\n', "utf-8")
    first, *rest = (str(p) for p in check_problems(tmp_path / "own.toml", tmp_path / "model"))
    assert "layers 0, 3 to 5, 7 of 'layers' lack all their tensors" in first
    assert len(rest) == 2
    assert "'layers.1.ffn_up.weight' has no tensor" in rest[0]
    assert "(nor has 1 other layer)" in rest[0]
    assert "'layers.1.ffn_down.weight' has no tensor" in rest[1]


def test_many_problems_are_cut_short(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, **{f"extra{chr(97 + n)}": rng(3) for n in range(20)})
    first, *lines, last = str(caught.value).split("\n")
    assert first.startswith(f"{tmp_path / 'model' / 'model.safetensors'}: 20 things do not fit (")
    assert len(lines) == 8
    assert all(line.startswith(f"  {tmp_path / 'own.toml'}:1:1: tensor 'extra") for line in lines)
    assert last == "  and 12 more"
    assert len(str(caught.value)) < 2500


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.0.b.12.c", "a.{i}.b.{i}.c"), ("h.3.w", "h.{i}.w"), ("w0.x", "w0.x"), ("a.1", "a.1"), ("1.a", "1.a")],
)
def test_patterns(name: str, expected: str) -> None:
    assert pattern(name) == expected


def test_bad_entries_of_unused_roles_do_not_stop_a_model(tmp_path: Path) -> None:
    load(tmp_path, '[tensors.layers]\nnobody = { from = "x", axes = "((" }\n')
    problems = check_problems(tmp_path / "own.toml", tmp_path / "model")
    assert [type(problem) for problem in problems] == [SpecError]


def test_fused_projections_of_a_gguf_stand_in_for_their_parts(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for call, number in (
        ("block_count", 1),
        ("embedding_length", 8),
        ("feed_forward_length", 12),
        ("head_count", 4),
        ("head_count_kv", 2),
    ):
        getattr(writer, f"add_{call}")(number)
    shapes = {
        "token_embd": (16, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,),
        "blk.0.attn_qkv": (16, 8),
    }
    shapes |= {
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_gate": (12, 8),
        "blk.0.ffn_up": (12, 8),
        "blk.0.ffn_down": (8, 12),
    }
    stored = {f"{name}.weight": rng(*shape) for name, shape in shapes.items()}
    for name, array in stored.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = load_model(tmp_path / "m.gguf").weights
    q, k, v = np.split(stored["blk.0.attn_qkv.weight"], [8, 12])
    for role, want in (("attn_q", q), ("attn_k", k), ("attn_v", v)):
        np.testing.assert_array_equal(weights.array(f"layers.0.{role}.weight"), want)


@pytest.mark.parametrize(
    "text",
    [
        '[layers.attn.rope]\nkind = "linear"\nscaling = { factor = 2.0 }\n',
        '[layers.attn.rope]\nkind = "linear"\n[layers.attn.rope.scaling]\nfactor = "cfg.stretch"\n',
        '[let.mine]\nfactor = "cfg.stretch"\n[layers.attn.rope]\nkind = "linear"\nscaling = "mine"\n',
    ],
)
def test_a_table_given_for_a_parameter_is_read_and_becomes_plain(text: str, tmp_path: Path) -> None:
    model = load(tmp_path, text, {"stretch": 2.0})
    assert check_problems(tmp_path / "own.toml", tmp_path / "model") == []
    tables = [node.params["scaling"] for node in model.graph.nodes if node.op == "rope"]
    assert tables == [{"factor": 2.0}] * 4
    assert all(type(table) is dict for table in tables)


def test_a_table_given_for_a_parameter_is_told_where_it_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="unknown name 'ffactor'") as caught:
        load(tmp_path, '[layers.attn.rope]\nkind = "linear"\nscaling = { factor = "ffactor" }\n')
    assert caught.value.where == f"{tmp_path / 'own.toml'}:4:23"
    with pytest.raises(SpecError, match="too deeply"):
        load(tmp_path, '[let.mine]\nfactor = "mine"\n[layers.attn.rope]\nscaling = "mine"\n')


def test_the_entry_of_the_newer_file_is_tried_first(tmp_path: Path) -> None:
    """Also where its key has other roles beside it; the inherited ones come after, for tensors that are not there."""
    fused = {"model.layers.0.qkv.weight": rng(16, 8)}
    gone = {f"model.layers.0.self_attn.{p}_proj.weight": None for p in "qkv"}
    layout = 'axes = "part in", split = "part", sizes = ["H * hd", "KV * hd", "KV * hd"] }'
    text = f'[tensors.layers]\n"attn_q, attn_k, attn_v" = {{ from = "model.layers.{{i}}.qkv", {layout}\n'
    model = load(tmp_path, text, **fused, **gone)
    np.testing.assert_array_equal(
        model.weights.array("layers.0.attn_k.weight"), fused["model.layers.0.qkv.weight"][8:12]
    )
    assert model.weights.plans["layers.1.attn_k.weight"].names == ("model.layers.1.self_attn.k_proj.weight",)
    both = {"model.layers.0.qkv.weight": rng(16, 8), "model.layers.1.qkv.weight": rng(16, 8, seed=6)}
    keep = text + '[tensors]\nignore = ["*.self_attn.[qkv]_proj.weight"]\n'
    model = load(tmp_path, keep, **both)
    for i in range(2):
        np.testing.assert_array_equal(
            model.weights.array(f"layers.{i}.attn_q.weight"), both[f"model.layers.{i}.qkv.weight"][:8]
        )


def test_a_slot_by_name_goes_first_in_its_own_file_only(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        'extends = "decoder"\n[norm]\nbias = true\n[tensors]\n"output_norm.bias" = "old_shift"\n', "utf-8"
    )
    norms = {
        f"model.layers.{i}.{n}.bias": rng(8) for i in range(2) for n in ("input_layernorm", "post_attention_layernorm")
    }
    stored = {"old_shift": rng(8), "new.weight": rng(8), "new.bias": rng(8), "model.norm.weight": None, **norms}
    spec = tmp_path / "mine.toml"
    spec.write_text('extends = "base"\n[tensors]\noutput_norm = "new"\nignore = ["old_shift"]\n', "utf-8")
    plans = load_model(write_checkpoint(tmp_path / "model", **stored), spec).weights.plans
    assert plans["output_norm.bias"].names == ("new.bias",)
    spec.write_text(
        'extends = "base"\n[tensors]\noutput_norm = "new"\n"output_norm.bias" = "old_shift"\nignore = ["new.bias"]\n',
        "utf-8",
    )
    assert load_model(tmp_path / "model", spec).weights.plans["output_norm.bias"].names == ("old_shift",)
