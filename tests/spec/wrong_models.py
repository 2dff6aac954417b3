"""Wrong as a model: blocks, parameters, stacks, shapes. ⟦ marks the place."""

from __future__ import annotations

from .tiny import Wrong

OWN = """[layers.ffn]
block = "mine"
%s
[block.mine.params]
width = "axis"
deep = "int = 1"
%s
[block.mine.parts]
ffn_up = { block = "linear", out = "width" }
ffn_down = { block = "linear", out = "d" }

[block.mine]
flow = [%s]
"""
FLOW = '"y = ffn_down(silu(ffn_up(x)))"'


def attn(keys: str) -> str:
    return f"[layers.attn]\n{keys}\n"


def names(lines: str) -> str:
    return f"[tensors.layers]\n{lines}\n"


PARTS = [
    Wrong("block-typo", attn('block = ⟦"atention"'), "there is no block 'atention'", "did you mean 'attention'"),
    Wrong("block-not-owning", attn('block = ⟦"rope"'), "there is no block 'rope'", "blocks are"),
    Wrong("block-number", attn("block = ⟦3"), "'block' is a word", 'block = "name"'),
    Wrong("parameter-typo", attn("windw = ⟦4"), "has no parameter 'windw'", "did you mean 'window'"),
    Wrong("rope-typo", "[layers.attn.rope]\nthetta = ⟦1e6\n", "no parameter 'thetta'", "did you mean 'theta'"),
    Wrong("norm-typo", "[norm]\nepsilon = ⟦1e-5\n", "no parameter 'epsilon'", "eps"),
    Wrong(
        "missing-parameter",
        "⟦" + OWN % ("width = 12\n", 'size = "int"', '"y = ffn_down(silu(ffn_up(x)))", "y = y * size"'),
        "'size' is missing",
        "give size",
    ),
    Wrong(
        "no-block",
        '[layers]\nflow = ["x += extra(x)"]\n\n⟦[layers.extra]\nout = 8\n',
        "'extra' has no block",
        "block =",
    ),
    Wrong("word-for-number", attn("window = ⟦\"'four'\""), "'window' must be int, it is 'four'", "config"),
    Wrong("float-for-int", attn("heads = ⟦2.5"), "'heads' must be int, it is 2.5"),
    Wrong("bool-for-int", attn("heads = ⟦true"), "'heads' must be int, it is True"),
    Wrong("number-for-bool", attn("bias = ⟦1"), "'bias' must be bool, it is 1"),
    Wrong("list-for-int", attn("heads = ⟦[4, 4]"), "'heads' must be int, it is [4, 4]"),
    Wrong("table-for-int", "⟦[layers.attn.heads]\nn = 4\n", "'heads' must be int, it is a table"),
    Wrong("word-for-table", attn("rope = ⟦3"), "'rope' must be a table, it is 3"),
    Wrong("null-for-int", attn('heads = ⟦"cfg.nothing"'), "'heads' is missing: cfg.nothing is not in"),
    Wrong("unknown-activation", '[layers.ffn]\nact = ⟦"sillu"\n', "'act' must be one of silu,", "did you mean 'silu'"),
    Wrong("unknown-choice", '[norm]\nkind = ⟦"rmss"\n', "'kind' must be one of rms, layer, l2", "did you mean 'rms'"),
    Wrong("zero-axis", "[layers.ffn]\nwidth = ⟦0\n", "'width' must be a positive int, it is 0"),
    Wrong("huge-axis", "[layers.ffn]\nwidth = ⟦4294967296\n", "'width' must be a positive int"),
    Wrong("infinite", attn("scale = ⟦inf"), "'scale' must be number, it is inf"),
    Wrong(
        "choose",
        "[layers.ffn]\nchoose = ⟦\"'big' if i else 'small'\"\n\n[layers.ffn.large]\nwidth = 12\n",
        "choose gives 'small'",
        "large",
    ),
    Wrong("choose-number", "[layers.ffn]\nchoose = ⟦3\n", "choose gives 3", "none"),
    Wrong(
        "own-block-key",
        OWN % ("width = 12\n", "", FLOW) + "flw = ⟦3\n",
        "block 'mine' has an unknown key 'flw'",
        "did you mean 'flow'",
    ),
    Wrong("own-block-type", OWN % ("width = 12\n", 'odd = ⟦"integer = 3"\n', FLOW), "'integer' is not a type", "int"),
    Wrong("own-block-untyped", OWN % ("width = 12\n", "odd = ⟦3\n", FLOW), "parameter 'odd' needs a type", "int"),
    Wrong("own-block-default", OWN % ("width = 12\n", 'odd = ⟦"int = 3 +"\n', FLOW), "is not an expression"),
    Wrong(
        "own-block-no-flow",
        '[layers.ffn]\nblock = "mine"\n\n[block.mine.params]\nwidth = "axis"\n'.replace("[block.mine", "⟦[block.mine"),
        "there is no flow",
        "flow =",
    ),
    Wrong(
        "own-block-circle",
        '[block.mine.parts]\nagain = { block = "mine" }\n\n⟦[block.mine]\n'
        'flow = ["y = again(x)"]\n\n[layers.ffn]\nblock = "mine"\n',
        "nested more than",
        "call itself",
    ),
    Wrong(
        "own-block-part",
        OWN % ("width = 12\n", "", '"y = ⟦ffn_dwn(ffn_up(x))"'),
        "'ffn_dwn' cannot be called here",
        "did you mean 'ffn_down'",
    ),
    Wrong("args", OWN % ("width = 12\n", "", FLOW) + "args = ⟦3\n", "'args' is a list of names", "args ="),
    Wrong("prefix", attn("prefix = ⟦3"), "'prefix' is a word"),
    Wrong("stack-key", "[layers]\ncuont = ⟦2\n", "stack 'layers' has no key 'cuont'", "did you mean 'count'"),
    Wrong(
        "stack-alternative-count",
        "[layers]\nchoose = \"'a'\"\n[layers.a]\ncount = ⟦2\n",
        "'count' stands in the stack 'layers' itself",
        "an alternative has flow, choose, args",
    ),
    Wrong("count-zero", "[layers]\ncount = ⟦0\n", "count is 0", "1 to 4096"),
    Wrong("count-negative", "[layers]\ncount = ⟦-2\n", "count is -2", "1 to 4096"),
    Wrong("count-huge", "[layers]\ncount = ⟦100000000\n", "count is 100000000", "1 to 4096"),
    Wrong("count-word", "[layers]\ncount = ⟦\"'two'\"\n", "count is 'two'", "1 to 4096"),
    Wrong("count-true", "[layers]\ncount = ⟦true\n", "count is True", "1 to 4096"),
    Wrong("count-missing", '[layers]\ncount = ⟦"cfg.nothing"\n', "count is None", "1 to 4096"),
    Wrong(
        "part-never-used",
        '[layers.extra]\nblock = ⟦"linear"\nout = "d"\n'.replace("block = ⟦", "block = ").replace("out = ", "out = ⟦"),
        "'layers.extra.out' is read by nothing",
        "remove",
        lint=True,
    ),
    Wrong("let-never-used", "[let]\nwindow = ⟦3\n", "'let.window' is read by nothing", "remove", lint=True),
]

SHAPES = [
    Wrong("residual", '[layers]\nflow = ["⟦x += attn(x)"]\n' + attn("out = 9"), "cannot be combined", "axes"),
    Wrong("heads-divide", '[layers]\nflow = ["x += ⟦heads(x, 3)"]\n', "axis d=8 cannot be cut into 3 heads", "heads"),
    Wrong("kv-heads", "⟦" + attn("kv_heads = 3"), "do not fit", "in block 'attention' at blocks.toml:"),
    Wrong("odd-rope", "⟦[layers.attn.rope]\ndim = 1\n", "rope dim 1 must be even", "rope.dim"),
    Wrong("wide-rope", "⟦[layers.attn.rope]\ndim = 4\n", "rope dim 4 must be even and at most", "rope.dim"),
    Wrong("zero-window", "⟦" + attn("window = 0"), "window must be positive", "leave window out"),
    Wrong(
        "split",
        '[layers]\nflow = ["a, b = ⟦split(x, [3, 4])", "x += concat(a, b)"]\n',
        "do not add up to d=8",
        "widths",
    ),
    Wrong("split-word", '[layers]\nflow = ["a, b = ⟦split(x, [\'a\', 8])", "x += concat(a, b)"]\n', "do not add up"),
    Wrong("merge", '[layers]\nflow = ["x += ⟦merge(x)"]\n', "merge needs [tokens, heads, dim]", "heads"),
    Wrong(
        "two-shapes",
        '[layers]\nflow = ["x += sum(up(up(x)))"]\n\n⟦[layers.up]\nblock = "linear"\nout = 12\n',
        "'up' is used with two shapes",
        "prefix",
    ),
    Wrong(
        "top-k",
        '⟦[layers.ffn]\nblock = "moe"\nexperts = 2\nwidth = 12\nact = "silu"\ntop_k = 3\n',
        "top_k 3 must be between 1 and",
        "top_k",
    ),
    Wrong(
        "param-shape",
        '[layers]\nflow = ["x += bump"]\n\n[layers.bump]\nblock = "param"\nshape = ⟦["0"]\n',
        "shape of 'bump' has 0",
        "positive",
    ),
    Wrong("theta-word", "[layers.attn.rope]\ntheta = ⟦\"'big'\"\n", "'theta' must be number, it is 'big'"),
]

MODELS = PARTS + SHAPES
