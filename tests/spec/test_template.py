"""A starting file: its comments are the base as it stands, without what the parts' blocks do not take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from inferflow.graph.build import build_graph
from inferflow.graph.dump import dump
from inferflow.spec.document import parse_toml
from inferflow.spec.library import list_specs, load_spec, plain
from inferflow.spec.template import starting_spec

from .tiny import CONFIG

MOE: dict[str, Any] = {
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 6,
    "num_experts_per_tok": 2,
}


def uncommented(text: str) -> str:
    head, _, rest = text.partition("[match]")
    return head + "[match]" + re.sub(r"^# ", "", rest, flags=re.MULTILINE)


@pytest.mark.parametrize("base", list_specs())
def test_all_that_is_inherited_is_shown_as_it_stands(base: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(uncommented(starting_spec(base)), "utf-8")
    ours, theirs = load_spec(path), load_spec(base)
    for key, node in plain(theirs.tree).items():
        if key not in ("match", "gguf"):
            assert plain(ours.tree)[key] == node
    assert ours.value("match", "prefix") == (theirs.value("match", "prefix") or [""])
    assert ours.value("match", "root") == theirs.value("match", "root")


@pytest.mark.parametrize("base", ["decoder", "mixtral", "deepseek_v2", "phimoe"])
def test_a_file_with_all_of_it_is_the_same_model(base: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(uncommented(starting_spec(base)), "utf-8")
    config = {**CONFIG, **MOE}
    graphs = [build_graph(load_spec(name), config).graph for name in (path, base)]
    ours, theirs = (dump(graph, 1).split("\n")[1:] for graph in graphs)  # without its name
    assert ours == theirs


def shown(base: str, table: str) -> set[str]:
    """The keys shown for one table."""
    tree = parse_toml(uncommented(starting_spec(base)), "mine.toml")
    for key in table.split("."):
        tree = tree.table(key)
    return set(tree)


def test_keys_that_the_block_does_not_take_are_left_out() -> None:
    assert "gated" in load_spec("mixtral").tree.table("layers").table("ffn")
    assert shown("mixtral", "layers.ffn") == {"block", "width", "act", "experts", "top_k", "router"}
    assert "kv_heads" in load_spec("deepseek_v3").tree.table("layers").table("attn")
    assert not {"kv_heads", "head_dim"} & shown("deepseek_v3", "layers.attn")
    assert {"heads", "kv_rank", "rope"} <= shown("deepseek_v3", "layers.attn")
    assert {"gated", "choose", "dense", "moe"} <= shown("deepseek_v3", "layers.ffn")  # one of its blocks takes it
    assert shown("decoder", "layers.attn") == {"block", "heads", "kv_heads", "head_dim", "rope"}


def test_what_of_match_is_inherited_stands_under_it() -> None:
    lines = starting_spec("gemma3", "mine").split("\n")
    start = lines.index("[match]")
    assert lines[start + 1] == 'model_type = ["mine"]'
    assert lines[start + 2].startswith('# prefix = ["", "language_model."]  # ')
    assert lines[start + 3].startswith('# root = "text_config"  # ')
    assert lines[start + 4] == ""
    assert '# prefix = [""]  # ' in starting_spec("llama")
    assert "# root" not in starting_spec("llama")
