"""What the linter excuses: parts of a spec that this config leaves out."""

from __future__ import annotations

from pathlib import Path

from inferflow.runtime.model import choose_spec
from inferflow.weights.check import check_spec
from inferflow.weights.open import open_source
from tests.tiny import write

ALTERNATIVES = """extends = "llama"

[layers.ffn]
choose = "'sparse' if cfg.num_experts else 'dense'"

[layers.ffn.dense]
width = "cfg.intermediate_size"

[layers.ffn.sparse]
block   = "moe"
experts = "cfg.num_experts"
width   = "cfg.intermediate_size"
top_k   = 2

[layers.ffn.sparse.router]
score = "sigmoid"

[tensors.layers]
ffn_gate_inp = "model.layers.{i}.mlp.gate"
"""


def problems(folder: Path, text: str) -> list[str]:
    file = folder / "mine.toml"
    file.write_text(text)
    source = open_source(write(folder / "model"))
    spec, config = choose_spec(source, file, source.config)
    return [str(problem) for problem in check_spec(spec, config, source)]


def test_an_alternative_that_is_not_chosen_is_excused_with_its_tables(tmp_path: Path) -> None:
    assert problems(tmp_path, ALTERNATIVES) == []


def test_a_key_beside_keys_that_are_read_is_not(tmp_path: Path) -> None:
    found = problems(tmp_path, ALTERNATIVES + '\n[layers.ffn.spare.router]\nscore = "sigmoid"\n\n[let]\nunused = 3\n')
    assert len(found) == 2
    assert "'let.unused' is read by nothing" in found[0] + found[1]
    assert "spare" in found[0] + found[1]
