"""Conditions of a spec: ``if`` in a parameter's table, and ``has('tensor')`` wherever an expression is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from inferflow.errors import SpecError
from inferflow.graph.build import build_graph
from inferflow.spec.library import load_spec

CONFIG = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_act": "silu",
}


def ops(text: str, folder: Path, tensors: tuple[str, ...] = (), **config: Any) -> Counter[str]:
    path = folder / "mine.toml"
    path.write_text('extends = "decoder"\n' + text)
    return Counter(node.op for node in build_graph(load_spec(path), {**CONFIG, **config}, tensors).graph.nodes)


def test_a_table_with_a_false_if_is_absent(tmp_path: Path) -> None:
    text = (
        '[layers.attn.rope]\nif = "i == 1 or cfg.turning"\n[layers.attn.qk_norm]\nif = "cfg.normed"\nkind = "layer"\n'
    )
    assert ops(text, tmp_path)["rope"] == 2
    assert ops(text, tmp_path, turning=True)["rope"] == 4
    assert ops(text, tmp_path, normed=True)["norm"] == ops(text, tmp_path)["norm"] + 4


def test_the_other_keys_of_the_table_are_still_checked(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no parameter 'dims'"):
        ops('[layers.attn.rope]\nif = "True"\ndims = 4\n', tmp_path)


def test_has_asks_for_a_tensor_in_every_expression(tmp_path: Path) -> None:
    in_let = '[let]\nbias = "8 if has(\'slopes\') else None"\n[layers.attn.rope]\nif = "not bias"\n'
    assert ops(in_let, tmp_path)["rope"] == 4
    assert ops(in_let, tmp_path, ("slopes",))["rope"] == 0
    in_part = "[layers.attn.rope]\nif = \"not has('slopes')\"\n"
    assert ops(in_part, tmp_path, ("slopes",))["rope"] == 0
    in_flow = "[layers]\nflow = [\"x += attn(attn_norm(x)) if has('mixer') else ffn(ffn_norm(x))\"]\n"
    assert ops(in_flow, tmp_path, ("mixer",))["sdpa"] == 2
    assert ops(in_flow, tmp_path)["sdpa"] == 0
