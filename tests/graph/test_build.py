"""From a spec to a graph: parts, choose, with, norms, scopes, stacks, names, and where the rows are selected."""

from __future__ import annotations

import pytest

from inferflow.errors import GraphError, SpecError
from inferflow.graph.graph import Graph
from inferflow.graph.primitives import PRIMITIVES

from .small import graph_of, ops, shape


def params(graph: Graph, op: str, key: str) -> list[object]:
    return [node.params[key] for node in ops(graph, op)]


def test_the_plain_decoder() -> None:
    graph = graph_of("")
    assert (graph.layers, graph.vocab, len(graph.caches)) == (3, 16, 3)
    assert [graph.nodes[n].op for n in graph.caches] == ["sdpa"] * 3
    assert len(graph.weights) == 3 + 3 * 9
    assert shape(graph, "layers.2.attn.q") == "['tokens', 'heads=4', 'head_dim=2']"
    assert graph.weights["layers.1.attn_k.weight"].sizes == (4, 8)
    assert str(graph.axis(-1)) == "vocab=16"
    assert shape(graph, "layers.0.attn") == shape(graph, "layers.0") == "['tokens', 'd=8']"


def test_every_node_reads_what_was_made_before_it() -> None:
    graph = graph_of(
        "[layers.ffn]\nblock = 'moe'\nexperts = 4\ntop_k = 2\nwidth = 6\nact = 'silu'\nshared = 5\nshared_gate = true\n"
    )
    made = set(graph.inputs.values())
    for node in graph.nodes:
        assert set(node.inputs) <= made
        made |= set(node.outputs)
        assert PRIMITIVES[node.op].inputs[0] <= len(node.inputs) <= PRIMITIVES[node.op].inputs[1]
    assert graph.output in made


def test_norms_start_from_their_base_and_go_over_it() -> None:
    graph = graph_of("[norm]\nkind = 'layer'\neps = 1e-3\nbias = true\n[layers.ffn_norm]\nkind = 'rms'\nbias = false\n")
    assert params(graph, "norm", "kind") == ["layer", "rms"] * 3 + ["layer"]
    assert set(params(graph, "norm", "eps")) == {1e-3}
    assert "layers.0.attn_norm.bias" in graph.weights
    assert "layers.0.ffn_norm.bias" not in graph.weights


def test_borrowed_parameters_go_between_the_base_and_the_part() -> None:
    graph = graph_of(
        "[let]\nmine = 0.25\n[norm]\neps = 0.5\nkind = 'layer'\n[layers.attn]\nqk_norm = { eps = 'mine' }\n"
    )
    inner = [node for node in ops(graph, "norm") if node.scope.endswith("attn")]
    assert {node.params["eps"] for node in inner} == {0.25}
    assert {node.params["kind"] for node in inner} == {"layer"}
    assert set(params(graph_of("[norm]\neps = 0.5\n[layers.attn]\nqk_norm = true\n"), "norm", "eps")) == {0.5}
    assert len(ops(graph_of("[layers.attn]\nqk_norm = false\n"), "norm")) == 7
    assert len(ops(graph_of("[layers.attn]\nqk_norm = { if = 'i == 1' }\n"), "norm")) == 9


def test_a_borrowed_parameter_is_evaluated_where_it_was_written() -> None:
    """`scale` is a name of the model, and a parameter of the block that the table is given to."""
    text = "[let]\nscale = 0.125\nkv_heads = 99\n[layers.attn]\nqk_norm = { eps = 'scale' }\n"
    inner = [node for node in ops(graph_of(text), "norm") if node.scope.endswith("attn")]
    assert {node.params["eps"] for node in inner} == {0.125}
    own = "[block.mine.params]\nscale = 'number = 0.5'\ngiven = 'table'\nwidth = 'axis'\n[block.mine.parts]\n"
    own += "up = { block = 'linear', out = 'scale * 16', with = 'given' }\ndown = { block = 'linear', out = 'd' }\n"
    own += "[block.mine]\nflow = ['y = down(up(x))']\n[layers.ffn]\nblock = 'mine'\n"
    graph = graph_of(text + own + "given = { bias = 'scale == 0.125' }\n")
    assert graph.weights["layers.0.up.weight"].sizes == (8, 8)  # the block's own key: its own scale
    assert "layers.0.up.bias" in graph.weights


def test_a_stack_chooses_layer_by_layer() -> None:
    text = "[layers]\nchoose = \"'even' if i % 2 == 0 else 'odd'\"\n[layers.even]\nflow = ['x += attn(x)']\n"
    text += "[layers.odd]\nargs = ['h']\nflow = ['h += mixer(h)']\n[layers.odd.mixer]\nblock = 'linear'\nout = 'd'\n"
    graph = graph_of(text)
    assert [node.scope for node in ops(graph, "sdpa")] == ["layers.0.attn", "layers.2.attn"]
    assert [key for key in graph.weights if "mixer" in key] == ["layers.1.mixer.weight"]


def test_shared_experts_of_no_width_are_none() -> None:
    text = "[layers.ffn]\nblock = 'moe'\nexperts = 4\ntop_k = 1\nwidth = 6\nact = 'silu'\n"
    text += "shared_gate = true\nshared_bias = true\n"
    for shared in ("", "shared = 0\n", "shared = 'None'\n"):
        assert not any("shexp" in key for key in graph_of(text + shared).weights)
    keys = graph_of(text + "shared = 5\n").weights
    assert keys["layers.0.ffn_down_shexp.bias"].sizes == (8,)
    assert "layers.0.ffn_gate_inp_shexp.weight" in keys
    assert "layers.0.ffn_down_exps.bias" not in keys


def test_a_vector_of_each_token_by_outer() -> None:
    text = "[layers]\nflow = ['a = outer(positions, exp(range(d)))', 'b = outer(heads(x, 2), range(3))', 'x += attn(x) * a']\n"
    graph = graph_of(text)
    assert shape(graph, "layers.0.a") == "['tokens', 'range=8']"
    assert shape(graph, "layers.0.b") == "['tokens', 'heads=2', 'head_dim=4', 'range=3']"


def test_choose_by_layer_lays_one_alternative_over_the_part() -> None:
    text = "[layers.attn]\nchoose = \"'a' if i == 1 else 'b'\"\nscale = 2\n[layers.attn.a]\nwindow = 4\nrope = false\n"
    graph = graph_of(text + "[layers.attn.b]\nscale = 3\n")
    assert params(graph, "sdpa", "window") == [None, 4, None]
    assert params(graph, "sdpa", "scale") == [3, 2, 3]
    assert len(ops(graph, "rope")) == 4


def test_an_alternative_with_another_block_drops_what_was_shared() -> None:
    text = "[layers.ffn]\nchoose = \"'m' if i else 'd'\"\ngated = false\nact = 'relu'\n[layers.ffn.d]\nwidth = 5\n"
    graph = graph_of(text + "[layers.ffn.m]\nblock = 'moe'\nexperts = 4\ntop_k = 1\nwidth = 6\n")
    assert [node.op for node in graph.nodes].count("router") == 2
    assert "layers.0.ffn_gate.weight" not in graph.weights
    assert graph.weights["layers.0.ffn_up.weight"].sizes == (5, 8)
    assert graph.weights["layers.2.ffn_up_exps.weight"].sizes == (4, 6, 8)


def test_an_absent_part_gives_its_argument_back() -> None:
    graph = graph_of("[layers.attn_norm]\nif = false\n[output_norm]\nif = 'cfg.nothing'\n")
    assert len(ops(graph, "norm")) == 3
    assert not any(key.startswith("output_norm") for key in graph.weights)


BLOCK = """
[layers.ffn]
block = "mine"
size = "d + 1"
[block.mine.params]
size = "axis"
twice = "int = size * 2"
word = "x | y = x"
[block.mine.parts]
up = { block = "linear", out = "size" }
down = { block = "linear", out = "d" }
[block.mine]
flow = ["size_of_mine = twice", "y = down(up(x)) * twice if word == 'x' else x"]
"""


def test_a_block_sees_its_parameters_and_then_the_model() -> None:
    graph = graph_of(BLOCK)
    assert [node.params["number"] for node in ops(graph, "binary") if node.scope.endswith("ffn")] == [18, 18, 18]
    assert str(graph.weights["layers.0.up.weight"].shape[0]) == "size=9"
    leaky = BLOCK.replace("y = down", "y = attn(x) + down")
    with pytest.raises(GraphError, match="'attn' cannot be called here"):
        graph_of(leaky)


def test_positions_and_tokens_are_seen_from_everywhere() -> None:
    text = BLOCK.replace("size_of_mine = twice", "p = x * (positions + 1)")
    graph = graph_of(text)
    inside = [n for n in ops(graph, "binary") if graph.inputs["positions"] in n.inputs]
    assert len(inside) == 3


def test_a_let_that_mentions_the_layer_is_evaluated_for_each() -> None:
    graph = graph_of("[let]\na = 'b * 10'\nb = 'i + 1'\n[layers.attn]\nwindow = 'a'\n")
    assert params(graph, "sdpa", "window") == [10, 20, 30]
    with pytest.raises(SpecError, match="unknown name 'i'"):
        graph_of("[let]\nvocab = 'i + 16'\n")


def test_the_same_role_twice_is_the_same_weight() -> None:
    twice = "[layers]\nflow = ['x += again(again(x))']\n[layers.again]\nblock = 'linear'\nout = 'd'\n"
    graph = graph_of(twice)
    assert len(ops(graph, "linear")) == 3 * 2 + 1
    assert sum(key.startswith("layers.") for key in graph.weights) == 3
    with pytest.raises(GraphError, match="used with two shapes"):
        graph_of(twice.replace("out = 'd'", "out = 9"))


def test_suffixes_and_prefixes_nest() -> None:
    text = "[layers.ffn]\nblock = 'moe'\nexperts = 4\ntop_k = 1\nwidth = 6\nact = 'silu'\nshared = 5\n"
    keys = graph_of(text + "prefix = 'a_'\nsuffix = '_z'\n").weights
    assert "layers.0.a_ffn_up_shexp_z.weight" in keys
    assert "layers.0.a_ffn_gate_inp_z.weight" in keys


def test_numbers_that_change_nothing_make_no_node() -> None:
    base = len(graph_of("").nodes)
    neutral = "[layers]\nflow = ['x += attn(attn_norm(x)) * 1 + 0', 'x += softcap(clamp(ffn(ffn_norm(x)), None), None) / 1']\n"
    assert len(graph_of(neutral).nodes) == base
    assert len(graph_of(neutral.replace("* 1", "* 2")).nodes) == base + 3


def test_several_stacks_and_arguments_that_stay() -> None:
    text = """
[model]
flow = ["e = token_embd(tokens)", "x = layers(e)", "x = more(x, e)", "logits = output(x)"]
[more]
args = ["h", "start"]
count = 2
flow = ["h = up(h) + start"]
[more.up]
block = "linear"
out = "d"
"""
    graph = graph_of(text)
    assert graph.layers == 5
    assert {"more.0.up.weight", "more.1.up.weight", "layers.2.attn_q.weight"} <= set(graph.weights)


# ------------------------------------------------------------------------------------------------ rows


def test_rows_are_selected_before_the_last_norm() -> None:
    graph = graph_of("[let]\nlogit_scale = 2\nlogit_softcap = 3\n")
    (select,) = ops(graph, "select")
    after = graph.nodes[graph.nodes.index(select) + 1 :]
    assert [node.op for node in after] == ["norm", "linear", "binary", "softcap"]
    assert all(graph.values[v].shape[0].name == "rows" for node in after for v in node.outputs)
    assert [graph.nodes[n].op for n in graph.caches] == ["sdpa"] * 3


def test_rows_are_selected_later_where_the_tail_reads_two_tensors() -> None:
    text = '[model]\nflow = ["e = token_embd(tokens)", "x = layers(e)", "y = output(output_norm(x + e))"]\n'
    graph = graph_of(text)
    (select,) = ops(graph, "select")
    at = graph.nodes.index(select)
    assert graph.nodes[at - 1].op == "binary"
    assert graph.nodes[at + 1].op == "norm"
