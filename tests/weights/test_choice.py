"""Reading a choice of formats, and giving them to a model's matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferflow.errors import ArgumentError
from inferflow.graph.build import build_graph
from inferflow.graph.graph import Graph
from inferflow.runtime.model import load_model
from inferflow.spec.library import load_spec
from inferflow.weights.choice import Choice, assign, parse_choice
from tests import tiny

WIDE = {**tiny.CONFIG, "hidden_size": 128, "intermediate_size": 192, "vocab_size": 256}


def graph(spec: str, **config: Any) -> Graph:
    return build_graph(load_spec(spec), {**WIDE, **config}, []).graph


def formats(choice: Any, of: Graph, same: Any = lambda key: key) -> dict[str, str]:
    return assign(parse_choice(choice), of, same)[0]


def test_what_can_be_written() -> None:
    assert parse_choice(None) == Choice("keep")
    assert parse_choice("q3.5") == parse_choice("q3h") == Choice("q3.5")
    two = Choice("q3.5", (("output", "q4"), ("attn_v", "q8")))
    assert parse_choice(" q3.5, output = q4,attn_v=q8 ") == two
    assert parse_choice({"default": "q3.5", "output": "q4", "attn_v": "q8"}) == two
    assert parse_choice("output=bf16") == Choice("keep", (("output", "bf16"),))
    assert parse_choice(str(two)) == two
    assert parse_choice(two) is two
    assert parse_choice("keep,output=keep").keeps_all
    assert not parse_choice("keep,output=q4").keeps_all


def test_a_table_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text('default = "q3"\noutput = "q4"\n"layers.0.*" = "q8"\n')
    assert parse_choice(path) == parse_choice(str(path)) == Choice("q3", (("output", "q4"), ("layers.0.*", "q8")))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("q5", "'q5' is no format"),
        ("q3.6", "did you mean 'q3.5'"),
        ("", "'' is no format"),
        ("q3.5,", "nothing before or after a comma"),
        ("q4,q3", "several formats for everything: q4, q3"),
        ("output=", "'' is no format"),
        ({"output": 4}, "4 is no format"),
        ({"output": {"a": "q4"}}, "is no format"),
        (4, "it is 4"),
        (["q4"], 'pass "q3.5"'),
        ("q4," + ",".join(["a=q4"] * 2000), "2001 rules"),
        ("nowhere.toml", "cannot be read: No such file"),
    ],
)
def test_what_is_no_choice(given: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_choice(given)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_file_with_anything_in_it(tmp_path: Path) -> None:
    for n, data in enumerate((b"\xff\xfe", b"default = ", b"[default]\nx = 1\n", b"a = [")):
        path = tmp_path / f"{n}.toml"
        path.write_bytes(data)
        with pytest.raises(ArgumentError):
            parse_choice(path)


def test_rules_go_by_role_and_by_key_and_the_last_counts() -> None:
    dense = graph("decoder")
    got = formats("q3.5,attn_*=q4,layers.1.attn_v=q8,layers.1.ffn_up.weight=f16,output=q3.5", dense)
    assert got["layers.0.attn_q.weight"] == got["layers.1.attn_k.weight"] == got["layers.0.attn_v.weight"] == "q4"
    assert got["layers.1.attn_v.weight"] == "q8"
    assert got["layers.1.ffn_up.weight"] == "f16"
    assert got["layers.0.ffn_up.weight"] == got["output.weight"] == "q3.5"
    assert "layers.0.attn_norm.weight" not in got


def test_the_output_is_a_step_finer_unless_a_rule_says_otherwise() -> None:
    dense = graph("decoder")
    assert formats("q3.5", dense)["output.weight"] == "q4"
    assert formats("q3.5,*=q3.5", dense)["output.weight"] == "q3.5"
    assert set(formats("keep", dense).values()) == {"keep"}


def test_one_tensor_has_one_format_the_highest() -> None:
    got = formats(
        "q3.5", graph("decoder"), lambda key: "shared" if key in ("output.weight", "token_embd.weight") else key
    )
    assert got["token_embd.weight"] == got["output.weight"] == "q4"


def test_what_cannot_take_a_format_is_told() -> None:
    experts = graph("mixtral", num_local_experts=16, num_experts_per_tok=2)
    got, fallbacks = assign(parse_choice("q4"), experts, lambda key: key)
    assert got["layers.0.ffn_gate_inp.weight"] == "keep"
    assert got["layers.0.ffn_down_exps.weight"] == "q4"
    assert [f.key for f in fallbacks] == ["layers.0.ffn_gate_inp.weight", "layers.1.ffn_gate_inp.weight"]
    assert str(fallbacks[0]) == "layers.0.ffn_gate_inp.weight is keep, not q4: it chooses the experts"
    assert {f.why for f in fallbacks} == {"it chooses the experts"}
    small = assign(parse_choice("q4"), graph("decoder", num_key_value_heads=1, hidden_size=64), lambda key: key)[1]
    assert str(small[0]) == "layers.0.attn_k.weight is keep, not q4: it has only 1024 elements"
    _, positions = assign(
        parse_choice("q4"), graph("gpt2", n_positions=512, n_embd=128, n_head=4, n_layer=1), lambda k: k
    )
    assert [(f.key, f.why) for f in positions] == [("position_embd.weight", "it is a table of positions")]
    assert not assign(parse_choice("f16"), experts, lambda key: key)[1]


def test_a_rule_for_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'attn_vv' names no matrix of this model \(did you mean 'attn_v'"):
        formats("q4,attn_vv=q8", graph("decoder"))


def test_floats_are_rounded_when_asked(tmp_path: Path) -> None:
    weights = load_model(tiny.write(tmp_path / "m"), quant="f16,output=f32").weights
    assert weights.stored("layers.0.attn_q.weight").format == "f16"
    exact = tiny.tensors()["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(weights.array("layers.0.attn_q.weight"), exact.astype(np.float16).astype(np.float32))
    assert np.shares_memory(weights.stored("output.weight").codes, weights.source.raw("lm_head.weight"))
