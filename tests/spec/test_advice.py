"""What is advised about a tensor that nothing reads and a weight that has none: the parameter that decides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from inferflow.spec.document import parse_toml
from inferflow.spec.library import Spec, load_spec
from inferflow.weights.asked import asked_by_role
from inferflow.weights.check import check_spec
from inferflow.weights.open import open_source

from .tiny import CONFIG, check_problems, write_checkpoint

MOE = """
[layers.ffn]
block = "moe"
experts = 3
width = 6
act = "silu"
top_k = 1
{}
[tensors.layers]
ffn_gate_inp = "model.layers.{{i}}.mlp.router"
exp_probs_b = "model.layers.{{i}}.mlp.shift"
ffn_up_exps = "model.layers.{{i}}.mlp.{{e}}.up"
ffn_gate_exps = "model.layers.{{i}}.mlp.{{e}}.gate"
ffn_down_exps = "model.layers.{{i}}.mlp.{{e}}.down"
ffn_up_shexp = "model.layers.{{i}}.shared.up"
ffn_gate_shexp = "model.layers.{{i}}.shared.gate"
ffn_down_shexp = "model.layers.{{i}}.shared.down"
"""
FUSED = """
[tensors.layers]
"attn_q, attn_k, attn_v" = { from = "model.layers.{i}.qkv", axes = "part in", split = "part", sizes = [8, 4, 4] }
"""


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def layers(**tensors: Any) -> dict[str, Any]:
    """The same tensors for both layers; ``__`` stands for a dot."""
    return {f"model.layers.{i}.{name.replace('__', '.')}": a for i in range(2) for name, a in tensors.items()}


def dense_gone() -> dict[str, Any]:
    return layers(**{f"mlp__{p}_proj__weight": None for p in ("gate", "up", "down")})


def experts() -> dict[str, Any]:
    shapes = {"up": (6, 8), "gate": (6, 8), "down": (8, 6)}
    stored = {f"mlp__{e}__{p}__weight": ones(*shape) for e in range(3) for p, shape in shapes.items()}
    return {**dense_gone(), **layers(**stored, mlp__router__weight=ones(3, 8))}


def said(folder: Path, text: str, stored: dict[str, Any], config: dict[str, Any] | None = None) -> list[str]:
    spec = folder / "own.toml"
    spec.write_text('extends = "decoder"\n' + text, "utf-8")
    model = write_checkpoint(folder / "model", {**CONFIG, **(config or {})}, **stored)
    return [str(problem).replace(str(folder), "D") for problem in check_problems(spec, model)]


# ------------------------------------------------------------------------------------------------ a tensor that nothing reads


def qk_norms() -> dict[str, Any]:
    return layers(self_attn__q_norm__weight=ones(2))


UNUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "guarded by if": (
        '[tensors.layers]\nattn_q_norm = "model.layers.{i}.self_attn.q_norm"\n',
        qk_norms(),
        "'attn_q_norm' maps this tensor, but no part asks for it: is qk_norm of 'attn' (attention) to be set?; or write "
        'tensors.ignore = ["model.layers.*.self_attn.q_norm.weight"]',
    ),
    "guarded by if, a param": (
        MOE.format(""),
        {**experts(), **layers(mlp__shift=ones(3))},
        "'exp_probs_b' maps this tensor, but no part asks for it: is score_bias of 'ffn' (moe) to be set?; or",
    ),
    "guarded by the flow, in a block in a block": (
        MOE.format(""),
        {**experts(), **layers(shared__up__weight=ones(5, 8))},
        "'ffn_up_shexp' maps this tensor, but no part asks for it: is shared of 'ffn' (moe) to be set?; or",
    ),
    "set, and false": (
        "[layers.ffn]\ngated = false\n",
        {},
        "'ffn_gate' maps this tensor, but no part asks for it: is gated of 'ffn' (mlp), false at D/own.toml:3:9, right?; or",
    ),
    "absent by its own if": (
        '[layers]\nflow = ["x += attn(attn_norm(x))", "x += post(ffn(ffn_norm(x)))"]\n'
        '[layers.post]\nblock = "norm"\nif = "cfg.post"\n[tensors.layers]\npost = "model.layers.{i}.post"\n',
        layers(post__weight=ones(8)),
        "'post' maps this tensor, but no part asks for it: is the 'if' of 'post' right (D/own.toml:6:6)?",
    ),
    "never called": (
        '[layers.post_norm]\n[tensors.layers]\npost_norm = "model.layers.{i}.post"\n',
        layers(post__weight=ones(8)),
        "'post_norm' maps this tensor, but no part asks for it: is 'post_norm' called by the flow of [layers]?",
    ),
    "no such role": (
        '[tensors.layers]\nattn_qnorm = "model.layers.{i}.self_attn.q_norm"\n',
        qk_norms(),
        "'attn_qnorm' maps this tensor, but no part asks for it: no part has that role (did you mean 'attn_q_norm'?)",
    ),
    "in another layer": (
        '[layers.attn]\nqk_norm = { if = "i == 0" }\n[tensors.layers]\nattn_q_norm = "model.layers.{i}.self_attn.q_norm"\n'
        'attn_k_norm = "model.layers.{i}.self_attn.q_norm"\n',
        qk_norms(),
        "'attn_q_norm' maps this tensor, but no part asks for it in layer 1: is qk_norm of 'attn' (attention), a table at "
        "D/own.toml:3:11, right?",
    ),
    "another alternative": (
        '[tensors]\noutput_norm = ["model.norm", "model.final"]\n',
        {"model.final.weight": ones(8)},
        "'output_norm' maps it, but reads 'model.norm.weight'; or write tensors.ignore = [\"model.final.weight\"]",
    ),
    "unmapped": (
        "",
        layers(post__weight=ones(8)),
        'map it in [tensors], or write tensors.ignore = ["model.layers.*.post.weight"]',
    ),
    "a bias": ("", layers(self_attn__q_proj__bias=ones(8)), "set q_bias (or bias) of 'attn' (attention)"),
    "a bias of several": (FUSED, {
        **layers(qkv__weight=ones(16, 8), qkv__bias=ones(16)),
        **layers(**{f"self_attn__{p}_proj__weight": None for p in "qkv"}),
    }, "set bias of 'attn' (attention)"),
    "a bias of experts": (
        MOE.format(""),
        {**experts(), **layers(**{f"mlp__{e}__up__bias": ones(6) for e in range(3)})},
        "set bias of 'ffn' (moe)",
    ),
    "a bias of a norm": (
        "",
        layers(input_layernorm__bias=ones(8)),
        "set bias = true in 'attn_norm' (norm), or in [norm] for all norms",
    ),
    "a bias of a norm inside": (
        '[layers.attn]\nqk_norm = true\n[tensors.layers]\nattn_q_norm = "model.layers.{i}.self_attn.q_norm"\n'
        'attn_k_norm = "model.layers.{i}.self_attn.q_norm"\n',
        {**qk_norms(), **layers(self_attn__q_norm__bias=ones(2))},
        "set bias = true in qk_norm of 'attn' (attention), or in [norm] for all norms",
    ),
    "a bias that none can have": (
        "",
        {"model.embed_tokens.bias": ones(8)},
        "'token_embd' (embed) has no parameter for a bias of 'token_embd': write a block of your own",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSED)
def test_a_tensor_that_nothing_reads(case: str, tmp_path: Path) -> None:
    text, stored, advice = UNUSED[case]
    (problem,) = said(tmp_path, text, stored)
    assert "used by no part of the spec (" in problem
    assert advice in problem
    assert ("ignore" in problem) is not case.startswith("a bias")


# ------------------------------------------------------------------------------------------------ a weight without a tensor

MISSING: dict[str, tuple[str, dict[str, Any], str]] = {
    "a bias": (
        "[layers.attn]\nbias = true\n",
        layers(**{f"self_attn__{p}_proj__bias": ones(8 if p == "q" else 4) for p in "qkv"}),
        "'layers.0.attn_output.bias' has no tensor in D/model/model.safetensors (nor has 1 other layer) (is bias of 'attn' "
        "(attention), true at D/own.toml:3:8, right? else set o_bias = false in 'attn' (attention))",
    ),
    "a bias of a norm": (
        "[norm]\nbias = true\n",
        {**layers(input_layernorm__bias=ones(8), post_attention_layernorm__bias=ones(8))},
        "(is bias of 'output_norm' (norm), true at D/own.toml:3:8, right? else set bias = false in 'output_norm' (norm))",
    ),
    "a norm": ("", {"model.norm.weight": None}, "a norm without one has weight = false, in 'output_norm')"),
    "by default": (
        '[layers.ffn]\nblock = "mlp2"\n[block.mlp2.params]\nwidth = "axis"\nact = "act"\ngated = "bool"\n'
        'linear = "bool = True"\n'
        '[block.mlp2.parts]\nffn_up = { block = "linear", out = "width" }\n'
        'ffn_down = { block = "linear", out = "d" }\nffn_extra = { block = "linear", out = "d", if = "linear" }\n'
        '[block.mlp2]\nflow = ["y = ffn_down(act(ffn_up(x)))", "y = ffn_extra(y)"]\n'
        '[tensors]\nignore = ["*gate_proj*"]\n',
        {},
        "add ffn_extra = \"name\" to [tensors.layers]; is linear of 'ffn' (mlp2), by default true, right?)",
    ),
    "gated": (
        "",
        layers(mlp__gate_proj__weight=None),
        "'layers.0.ffn_gate.weight' has no tensor in D/model/model.safetensors (nor has 1 other layer) (looked for "
        "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.gate_proj; is gated of 'ffn' (mlp), true at decoder.toml:",
    ),
    "the same shape": (
        '[tensors.layers]\nffn_down = "model.layers.{i}.mlp.dwn_proj"\n',
        {},
        "did you mean 'model.layers.0.mlp.down_proj.weight'?",
    ),
    "another shape": (
        '[tensors.layers]\nffn_down = "model.layers.{i}.mlp.dwn_proj"\n',
        layers(mlp__down_proj__weight=None, mlp__dwn_prj__weight=ones(3)),
        "(looked for model.layers.0.mlp.dwn_proj.weight, model.layers.0.mlp.dwn_proj)",
    ),
    "a layout that gives the shape": (
        '[tensors.layers]\nffn_down = { from = "model.layers.{i}.mlp.dwn_proj", axes = "in out -> out in" }\n',
        layers(mlp__down_proj__weight=None, mlp__dwn_prj__weight=ones(12, 8)),
        "did you mean 'model.layers.0.mlp.dwn_prj.weight'?",
    ),
    "many names": (
        '[match]\nprefix = ["", "a.", "b.", "c."]\n[tensors]\noutput_norm = "ln_f"\nignore = ["model.norm*"]\n',
        {},
        "(looked for ln_f.weight, a.ln_f.weight, b.ln_f.weight, c.ln_f.weight and 4 more",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_weight_without_a_tensor(case: str, tmp_path: Path) -> None:
    text, stored, advice = MISSING[case]
    problems = said(tmp_path, text, stored)
    assert "has no tensor" in problems[0]
    assert advice in problems[0]


def test_a_tensor_that_another_weight_reads_is_not_meant(tmp_path: Path) -> None:
    (problem,) = said(tmp_path, "", {"model.layers.0.input_layernorm.weight": None})
    assert "did you mean" not in problem
    assert "'layers.0.attn_norm.weight' has no tensor" in problem


def test_the_parameter_that_asks_for_experts_biases(tmp_path: Path) -> None:
    text = MOE.format('bias = "cfg.mlp_bias"')
    stored = {**experts(), **layers(**{f"mlp__{e}__{p}__bias": ones(6) for e in range(3) for p in ("up", "gate")})}
    (problem,) = said(tmp_path, text, stored, {"mlp_bias": True})
    assert "'layers.0.ffn_down_exps.bias' has no tensor" in problem
    assert "is bias of 'ffn' (moe), \"cfg.mlp_bias\" at D/own.toml:9:8, right? else set bias = false" in problem


def test_the_same_of_a_gguf(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    numbers = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 12, "head_count": 4, "head_count_kv": 4}
    for name, number in numbers.items():
        getattr(writer, f"add_{name}")(number)
    shapes = {f"attn_{p}.weight": (8, 8) for p in ("q", "k", "v", "output")}
    shapes |= {"attn_norm.weight": (8,), "ffn_norm.weight": (8,), "ffn_down.weight": (8, 12)}
    shapes |= {"ffn_gate.weight": (12, 8), "ffn_up.weight": (12, 8)}
    shapes |= {"attn_q_norm.weight": (2,), "attn_output.bias": (8,), "odd.weight": (3,)}
    stored = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    for name, shape in {**stored, "token_embd.weight": (16, 8), "output_norm.weight": (8,)}.items():
        writer.add_tensor(name, ones(*shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_source(tmp_path / "m.gguf")
    spec = load_spec("decoder")
    text = "\n".join(str(problem) for problem in check_spec(spec, source.config, source))
    source.close()
    assert "set o_bias (or bias) of 'attn' (attention)" in text
    assert (
        "'attn_q_norm' maps this tensor, but no part asks for it: is qk_norm of 'attn' (attention) to be set?" in text
    )
    assert 'map it in [gguf.tensors], or write gguf.ignore = ["blk.*.odd.weight"]' in text


# ------------------------------------------------------------------------------------------------ the text itself


def test_guards_are_conditions_that_every_use_stands_under() -> None:
    text = """
[part]
block = "mine"
choose = "'a'"
[part.a]
b2 = true
[block.mine.params]
b1 = "bool = False"
b2 = "bool = b1"
one = "bool = False"
two = "table = None"
[block.mine.parts]
always = { block = "linear", out = "d", bias = "b2" }
both = { block = "linear", out = "d" }
left = { block = "linear", out = "d" }
own = { block = "linear", out = "d", if = "two" }
deep = { block = "inner", flag = "one", bias = "b2", table = "two", prefix = "p_", suffix = "_s" }
circle = { block = "mine" }
[block.mine]
flow = [
  "y = both(x) if one else both(x) + left(x)",
  "y = always(y) + (always(y) if two else 0) + own(x)",
  "y = deep(y) if b1 else y",
]
[block.inner.params]
flag = "bool"
bias = "bool = False"
table = "table = None"
[block.inner.parts]
lin = { block = "linear", out = "d", bias = "bias" }
in_norm = { with = "table" }
[block.inner]
flow = ["y = lin(x) if flag else x", "y = in_norm(y)"]
"""
    tree = parse_toml(text, "x.toml")
    found = asked_by_role(Spec("x", tree, tree.table("block"), ("x.toml",)))
    rows = {role: (a.guards, a.bias, a.inside, a.owner) for (_, role), (a,) in found.items()}
    assert rows == {
        "always": ((), ("b2", "b1"), "", "'part' (mine)"),
        "both": ((), (), "", "'part' (mine)"),
        "left": (("one",), (), "", "'part' (mine)"),
        "own": (("two",), (), "", "'part' (mine)"),
        "p_lin_s": (("b1", "one"), ("b2", "b1"), "", "'part' (mine)"),
        "p_in_norm_s": (("b1",), ("bias",), "two", "'part' (mine)"),
    }
    assert "b2" in found["", "always"][0].table
