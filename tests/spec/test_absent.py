"""What is missing for want of a key in the config names the key, and one that may be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferflow.errors import SpecError
from inferflow.graph.absent import absent_keys, explain, near_key
from inferflow.graph.scope import ModelScope
from inferflow.spec.document import Leaf, make_table

from .tiny import CONFIG, check_problems, load_problem, write_checkpoint

MOE = '[layers.ffn]\nblock = "moe"\nexperts = {}\nwidth = "w"\nact = "silu"\ntop_k = 1\n[let]\nw = "cfg.a or cfg.b"\n'
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "num_experts_note": "x"}
Q = '[tensors.layers]\nattn_q = {{ from = "model.layers.{{i}}.self_attn.q_proj", axes = "(h e) in", h = {} }}\n'

CASES: dict[str, tuple[str, str, str]] = {
    "a parameter": (
        MOE.format('"cfg.num_experts"'),
        "4:11: 'experts' is missing: cfg.num_experts is not in the config",
        "did you mean cfg.n_routed_experts?",
    ),
    "through a name": (
        MOE.format('"E"') + 'E = "cfg.num_experts"\n',
        "4:11: 'experts' is missing: cfg.num_experts is not in the config",
        "did you mean cfg.n_routed_experts?",
    ),
    "in arithmetic": (
        MOE.format('"E * 2"') + 'E = "cfg.num_experts"\n',
        "4:12: 'E' is missing (None) in 'E * 2': cfg.num_experts is not in the config",
        "did you mean cfg.n_routed_experts?",
    ),
    "in arithmetic, by its key": (
        '[let]\nhd = "d // cfg.n_heads"\n',
        "3:12: 'cfg.n_heads' is missing (None) in 'd // cfg.n_heads' (",
        "did you mean cfg.num_attention_heads?",
    ),
    "two keys, none like them": (
        MOE.format("3"),
        "5:9: 'width' is missing: cfg.a and cfg.b are not in the config",
        "give it a value, or a fallback with 'or'",
    ),
    "the number of layers": (
        '[layers]\ncount = "cfg.n_layers"\n',
        "3:9: count is None: cfg.n_layers is not in the config",
        "did you mean cfg.num_hidden_layers?",
    ),
    "a null": (
        '[layers]\ncount = "cfg.empty"\n',
        "3:9: count is None: cfg.empty is null in the config",
        "a stack has 1 to",
    ),
    "a size of a layout": (
        Q.format('"cfg.n_heads"'),
        "it is None: cfg.n_heads is not in the config",
        "did you mean cfg.num_attention_heads?",
    ),
    "a size computed": (Q.format('"n * 2"') + '[let]\nn = "cfg.n_heads"\n', "'n * 2': cfg.n_heads is not", "cfg.num_att"),
    "none of the config's doing": ('[layers.attn]\nheads = "None"\n', "'heads' must be int, it is missing (None)", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_missing(case: str, tmp_path: Path) -> None:
    text, says, fix = CASES[case]
    spec = tmp_path / "own.toml"
    spec.write_text('extends = "decoder"\n' + text, "utf-8")
    model = write_checkpoint(tmp_path / "model", {**CONFIG, **EXPERTS, "empty": None})
    (problem,) = check_problems(spec, model)
    for error in (problem, load_problem(spec, model)):
        assert says in str(error)
        assert fix in str(error)


@pytest.mark.parametrize(
    ("word", "kind", "expected"),
    [
        ("num_experts", "axis", "n_routed_experts"),
        ("num_experts", "act", "experts_num"),
        ("n_layer", "int", "num_hidden_layers"),
        ("head_dims", "int", "head_dim"),
        ("rmsNormEps", "number", "rms_norm_eps"),
        ("hidden_dim", "int", "hidden_size"),
        ("tied", "bool", ""),
        ("nothing_like_it", "any", ""),
        ("secret", "any", ""),
    ],
)
def test_the_nearest_key(word: str, kind: str, expected: str) -> None:
    config: dict[str, Any] = {
        "num_experts_per_tok": 2, "n_routed_experts": 4, "experts_num": "four", "num_hidden_layers": 2, "head_dim": 4,
        "rms_norm_eps": 1e-6, "hidden_size": 8, "tied": None, "_secret": 3,
    }  # fmt: skip
    assert near_key(word, config, kind) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cfg.here", ""),
        ("cfg.gone or cfg.here", ""),
        ("cfg.gone or cfg.lost", "cfg.gone and cfg.lost are not in the config"),
        ("cfg.gone if cfg.lost else cfg.here", "cfg.gone is not in the config"),
        ("cfg.table.gone.deep", "cfg.table.gone is not in the config"),
        ("cfg.here.gone", ""),
        ("t.gone", "cfg.lost is not in the config"),
        ("[circle, cfg.gone]", "cfg.gone is not in the config"),
        ("cfg.null", "cfg.null is null in the config"),
        ("1 +", ""),
        ("odd", ""),
    ],
)
def test_keys_that_were_wanted_in_vain(text: str, expected: str) -> None:
    let = make_table({"t": "cfg.lost", "circle": "circle or other", "other": "circle"})
    config = {"here": 3, "table": {"x": 1}, "null": None}
    assert absent_keys(Leaf(text), ModelScope(let, config, ()), config)[0] == expected


def test_an_error_is_explained_once() -> None:
    config = {"heads": 4}
    scope = ModelScope(make_table({"H": "cfg.n_head"}), config, ())
    error = SpecError("'H' is missing (None) in 'H + 1'", where="x", fix="give it")
    explain(error, scope, config)
    explain(error, scope, config)
    assert error.reason == "'H' is missing (None) in 'H + 1': cfg.n_head is not in the config"
    assert error.fix == "did you mean cfg.heads?"
    other = SpecError("another", where="x", fix="give it")
    explain(other, scope, config)
    assert (other.reason, other.fix) == ("another", "give it")
