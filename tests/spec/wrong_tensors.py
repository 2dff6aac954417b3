"""Wrong against the checkpoint: names, layouts, values. ⟦ marks where the error must point."""

from __future__ import annotations

import numpy as np

from .tiny import Wrong
from .wrong_models import names

GATE = 'from = "model.layers.{i}.mlp.gate_proj"'
JOINED = {f"model.layers.{i}.qkv.weight": np.ones((16, 8), np.float32) for i in range(2)}
JOINED |= {f"model.layers.{i}.self_attn.{p}_proj.weight": None for i in range(2) for p in "qkv"}


def gate(keys: str) -> str:
    """The gate's entry with these keys; the mark is in them."""
    return names(f"ffn_gate = {{ {GATE}, {keys} }}")


def entry(keys: str) -> str:
    """The same with the mark before the entry."""
    return names(f"ffn_gate = ⟦{{ {GATE}, {keys} }}")


def joined(name: str, keys: str, says: str, fix: str = "") -> Wrong:
    """q, k and v of one tensor; the mark is before the entry."""
    comma = ", " if keys else ""
    text = names(f'"attn_q, attn_k, attn_v" = ⟦{{ from = "model.layers.{{i}}.qkv"{comma}{keys} }}')
    return Wrong(name, text, says, fix, stored=JOINED)


TENSORS = [
    Wrong(
        "name-typo",
        names('ffn_gate = ⟦"model.layers.{i}.mlp.gate_prj"'),
        "'layers.0.ffn_gate.weight' has no tensor",
        "did you mean 'model.layers.0.mlp.gate_proj.weight'",
    ),
    Wrong("entry-number", names("ffn_gate = ⟦3"), "role 'ffn_gate' needs a name", "checkpoint.name"),
    Wrong(
        "unmapped",
        '[layers]\nflow = ["x += attn(attn_norm(x)) * bump", "x += ffn(ffn_norm(x))"]\n'
        '\n⟦[layers.bump]\nblock = "param"\nshape = ["d"]\n',
        "'layers.0.bump.value' has no tensor",
        'bump = "name"',
    ),
    Wrong(
        "unused-role",
        names('fn_gate = ⟦"model.layers.{i}.mlp.gate_proj"'),
        "no part has the role 'fn_gate'",
        "did you mean 'ffn_gate'",
        lint=True,
    ),
    Wrong(
        "misshapen",
        names('ffn_gate = ⟦"model.layers.{i}.mlp.down_proj"\nffn_down = "model.layers.{i}.mlp.down_proj"'),
        "'layers.0.ffn_gate.weight' must be",
        "axes",
    ),
    Wrong(
        "unused-tensor",
        "",
        "is used by no part of the spec",
        "map it in [tensors]",
        extends='⟦extends = "decoder"\n',
        stored={"model.bump": np.ones(3, np.float32)},
    ),
    Wrong("axes-arrow", gate('axes = ⟦"out in -> in"'), "'out' is on the left only", '"out in -> (out in)"'),
    Wrong("axes-one", gate('axes = ⟦"(one e) in -> e in"'), "'one' is on the left only", '"(one e) in -> (one e) in"'),
    Wrong("axes-right", gate('axes = ⟦"in -> out in"'), "must name each axis once", "in out -> out in"),
    Wrong("axes-twice", gate('axes = ⟦"in in -> in"'), "must name each axis once", "in out -> out in"),
    Wrong("axes-open", gate('axes = ⟦"(out in"'), "has an open bracket", "close"),
    Wrong("axes-character", gate('axes = ⟦"out, in"'), "cannot be read at 'out,'"),
    Wrong("axes-number", gate("axes = ⟦3"), "'axes' is a string", "out in"),
    Wrong("axes-empty", gate('axes = ⟦""'), "must name each axis once"),
    Wrong("axes-dimensions", entry('axes = "a b c"'), "describe 3 dimensions"),
    Wrong("axes-unknown-size", entry('axes = "(a b) in"'), "axes a, b have no size", "give a ="),
    Wrong("axes-wrong-size", entry('axes = "(a b) in", a = 5'), "does not fit the stored size 12"),
    Wrong("axes-size-word", gate('axes = "(a b) in", a = ⟦"\'x\'"'), "a size is a positive whole number, it is 'x'"),
    Wrong("axes-size-zero", gate('axes = "(a b) in", a = ⟦0'), "a size is a positive whole number, it is 0"),
    Wrong("entry-key", gate('axis = ⟦"a b"'), "unknown key 'axis'", "did you mean 'axes'"),
    Wrong("transposed", entry('axes = "a b -> b a"'), "'layers.0.ffn_gate.weight' must be", "axes"),
    joined("no-split", "", "several roles come from one tensor by a split", "split ="),
    joined("split-name", 'axes = "part in", split = "prt", sizes = [8, 4, 4]', "the split does not fit", "part"),
    joined("split-sizes", 'axes = "part in", split = "part", sizes = [8, 4]', "the split does not fit", "sizes"),
    joined("split-sum", 'axes = "part in", split = "part", sizes = [8, 4, 8]', "does not fit the stored size 16"),
    joined("split-number", 'axes = "part in", split = 3, sizes = [8, 4, 4]', "the split does not fit"),
    Wrong("value-shape", gate('value = ⟦"3"'), "value '3' must give a tensor", "w + 1"),
    Wrong("value-name", gate('value = "1 + ⟦ww"'), "unknown name 'ww'", "did you mean 'w'"),
    Wrong("value-function", gate('value = "⟦sin(w)"'), "unknown function 'sin'"),
    Wrong("value-norm", gate('value = ⟦"norm(w)"'), "must give a tensor of the same shape"),
    Wrong("value-number", gate("value = ⟦3"), "'value' is a string"),
    Wrong("ignore-number", "[tensors]\nignore = [⟦3]\n", "an entry of 'ignore' is a string", "*"),
    Wrong("ignore-string", '[tensors]\nignore = ⟦"vision.*"\n', "'ignore' is a list of strings", "README"),
    Wrong("prefix-number", "[match]\nprefix = ⟦3\n", "'prefix' is a string or a list of strings"),
    Wrong(
        "layers-more",
        "[layers]\ncount = 3\n\n⟦[tensors]\nignore = []\n",
        "layer 2 of 'layers' lacks all its tensors in",
        "counts more layers",
    ),
]
