"""From a name to one document: extends, merging, removal, overriding; and which spec serves a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferflow.errors import SpecError
from inferflow.spec.document import Leaf, Table, make_table, parse_toml
from inferflow.spec.library import find_spec, for_gguf, list_specs, load_spec, merge, override, plain


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text, "utf-8")
    return folder / "own.toml"


def test_merging_is_key_by_key_and_lists_are_replaced() -> None:
    base = make_table({"a": {"x": 1, "y": {"deep": 1, "kept": 2}}, "list": [1, 2], "gone": {"t": 1}, "new": 3})
    child = make_table({"a": {"y": {"deep": 9}}, "list": [3], "gone": False, "new": {"table": 1}})
    assert plain(merge(base, child)) == {
        "a": {"x": 1, "y": {"deep": 9, "kept": 2}},
        "list": [3],
        "gone": False,
        "new": {"table": 1},
    }
    assert plain(base)["list"] == [1, 2]


def test_overriding_makes_the_tables_on_its_way() -> None:
    tree = make_table({"a": {"b": 1}, "v": 2})
    assert plain(override(tree, "a.c.d", Leaf(3))) == {"a": {"b": 1, "c": {"d": 3}}, "v": 2}
    assert plain(override(tree, "v.w", Leaf(3))) == {"a": {"b": 1}, "v": {"w": 3}}
    assert plain(override(tree, "a", Leaf(3))) == {"a": 3, "v": 2}
    assert plain(tree) == {"a": {"b": 1}, "v": 2}


def test_a_chain_of_files_and_the_places_of_its_entries(tmp_path: Path) -> None:
    own = write(
        tmp_path,
        own='extends = "middle"\n[let]\na = 1\n',
        middle='extends = "decoder"\n[let]\na = 2\nb = 3\n[block.mine]\nflow = ["y = x"]\n',
    )
    spec = load_spec(own)
    assert spec.name == "own"
    assert [Path(file).name for file in spec.files] == ["own.toml", "middle.toml", "decoder.toml"]
    assert (spec.value("let", "a"), spec.value("let", "b")) == (1, 3)
    assert spec.value("nothing", "at", "all") is None
    let = spec.tree.table("let")
    assert [Path(let[k].where.file).name for k in ("a", "b", "d")] == ["own.toml", "middle.toml", "decoder.toml"]
    assert {"mine", "attention", "moe"} <= set(spec.blocks)
    assert "block" not in spec.tree
    assert "extends" not in spec.tree


def test_a_block_of_ones_own_may_change_a_shipped_one(tmp_path: Path) -> None:
    own = write(tmp_path, own='extends = "decoder"\n[block.mlp]\nflow = ["y = ffn_down(ffn_up(x))"]\n')
    mlp = load_spec(own).blocks.table("mlp")
    assert plain(mlp["flow"]) == ["y = ffn_down(ffn_up(x))"]
    assert "width" in mlp.table("params")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"own": 'extends = "own"\n'}, "extends itself"),
        ({"own": 'extends = "b"\n', "b": 'extends = "own"\n'}, "extends itself"),
        ({"own": 'extends = "a0"\n', **{f"a{n}": f'extends = "a{n + 1}"\n' for n in range(20)}}, "extends"),
        ({"own": 'extends = "nowhere"\n'}, "there is no spec called 'nowhere'"),
        ({"own": "extends = [1]\n"}, "is the name of a spec"),
        ({"own": "[extends]\n"}, "is the name of a spec"),
        ({"own": 'extends = "b"\n', "b": "x = \n"}, "not valid TOML"),
    ],
)
def test_extends_that_fail(files: dict[str, str], says: str, tmp_path: Path) -> None:
    own = write(tmp_path, **files)
    with pytest.raises(SpecError, match=says) as caught:
        load_spec(own)
    assert caught.value.where.startswith(str(tmp_path))
    assert caught.value.fix


def test_what_the_converter_changed_is_laid_over() -> None:
    text = '[layers.attn]\nbias = 1\n[gguf.set]\n"layers.attn.bias" = 2\n"norm.add_one" = false\n'
    spec = load_spec("llama")
    changed = for_gguf(type(spec)("x", parse_toml(text, "x.toml"), Table({}), ("x.toml",)))
    assert changed.value("layers", "attn", "bias") == 2
    assert changed.value("norm", "add_one") is False


def test_the_shipped_specs_are_listed_and_all_load() -> None:
    names = list_specs()
    assert {"decoder", "llama", "gpt2"} <= set(names)
    assert not {"blocks", "formats", "pretokenizers", "turn_enders"} & set(names)
    for name in names:
        assert load_spec(name).value("model", "kind") == "causal-lm"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "does not say its model_type"),
        ({"model_type": 3}, "does not say its model_type"),
        ({"model_type": "no_such"}, "no shipped spec serves model_type 'no_such'"),
        ({"gguf_arch": "no_such"}, "no shipped spec serves arch 'no_such'"),
        ({"model_type": 'x"]\n[match'}, "no shipped spec serves"),
    ],
)
def test_configs_of_no_spec(config: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        find_spec(config)
    assert says in caught.value.reason
    assert caught.value.fix
