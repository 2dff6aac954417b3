"""The primitive catalogue: what a flow can call and an engine must implement.

For each primitive: its parameters (a signature), how many tensors it takes, the shapes it gives, the weights it owns, and
what it costs. `inferflow.kernels.reference` defines what each computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import GraphError
from ..spec.document import make_table
from ..spec.signature import ACTIVATIONS, Signature, parse_signature
from .axes import ONE, TOKENS, Axis, Shape, broadcast, joined, show

__all__ = ["PRIMITIVES", "UNARY", "Cost", "Primitive", "cost"]

Shapes = tuple[Shape, ...]
Params = Mapping[str, Any]
MAX_DIMS = 8
MAX_KERNEL = 64
MAX_RANGE = 1 << 24  # beyond it float32 has no odd numbers
UNARY = ("exp", "log", "sqrt", "abs", "floor", "ceil", "sin", "cos", *dict.fromkeys(ACTIVATIONS.values()))


@dataclass(frozen=True)
class Primitive:
    """`infer` proves the shapes and gives the outputs'; `weights` lists (slot, shape); `multiplies` is the number of
    multiply-adds per token (per token and key for `sdpa`); `token_wise` says that no token sees another."""

    name: str
    doc: str
    signature: Signature
    inputs: tuple[int, int]
    infer: Callable[[Shapes, Params], Shapes]
    weights: Callable[[Shapes, Params], list[tuple[str, Shape]]] = lambda shapes, params: []
    multiplies: Callable[[Shapes, Params], int] = lambda shapes, params: 0
    optional: tuple[str, ...] = ()  # tensor inputs that may be given by keyword, or None
    vanishes: bool = False  # f(x, None) is x
    owns_weights: bool = False
    token_wise: bool = True
    state: Callable[[Shapes, Params], tuple[int, ...]] | None = None  # shape of what one sequence's last token leaves


@dataclass(frozen=True)
class Cost:
    """Of one node. `flops` per token, `flops_per_key` per token and key attended to, `weights` in elements read,
    `kv` in elements cached per token."""

    flops: int
    flops_per_key: int = 0
    weights: int = 0
    kv: int = 0


def last(shape: Shape) -> Axis:
    """The axis that something is done along; never the tokens, which do not see each other there."""
    if shape[-1].size is None:
        fix = "outer(x, range(n)) gives a value of each token an axis of its own"
        raise GraphError(f"{show(shape)} has no axis but that of the tokens", fix=fix)
    return shape[-1]


def count(shape: Shape) -> int:
    """Elements per token."""
    return math.prod(a.size for a in shape if a.size is not None)


# ------------------------------------------------------------------------------------------------ with weights


def embed(shapes: Shapes, p: Params) -> Shapes:
    if len(shapes[0]) != 1:
        raise GraphError(
            f"an embedding takes integer ids [tokens], it got {show(shapes[0])}", fix="call it with tokens"
        )
    return ((*shapes[0], p["dim"]),)


def linear(shapes: Shapes, p: Params) -> Shapes:
    x = shapes[0]
    if p["experts"] is None:
        if len(shapes) > 1:
            raise GraphError("a linear part takes expert ids only when it has 'experts'", fix="give it experts = n")
        return ((*x[:-1], p["out"]),)
    if len(shapes) != 2:
        raise GraphError("a linear part with 'experts' is called with (x, ids)", fix="write part(x, ids)")
    ids = shapes[1]
    if x[: len(ids)] != ids and x[:-1] != ids[:-1]:
        raise GraphError(f"x {show(x)} does not go with the ids {show(ids)}", fix="ids are what router(…) gave for x")
    return ((*ids, p["out"]),)


def linear_weights(shapes: Shapes, p: Params) -> list[tuple[str, Shape]]:
    lead = () if p["experts"] is None else (p["experts"],)
    weight = ("weight", (*lead, p["out"], last(shapes[0])))
    return [weight, ("bias", (*lead, p["out"]))] if p["bias"] else [weight]


def linear_multiplies(shapes: Shapes, p: Params) -> int:
    rows = count(shapes[0][:-1]) if p["experts"] is None else count(shapes[1])
    return rows * int(p["out"].size) * int(last(shapes[0]).size or 0)


def normed(shapes: Shapes, p: Params) -> Shapes:
    last(shapes[0])
    if p["eps"] < 0:
        raise GraphError(f"eps is {p['eps']}", fix="a norm's eps is not negative")
    return (shapes[0],)


def norm_weights(shapes: Shapes, p: Params) -> list[tuple[str, Shape]]:
    shape = shapes[0][-2:] if p["per_head"] else shapes[0][-1:]
    return [(slot, shape) for slot in ("weight", "bias") if p[slot]]


def stored(shapes: Shapes, p: Params) -> Shapes:
    if not 0 < len(p["shape"]) <= MAX_DIMS:
        raise GraphError(f"a tensor of {len(p['shape'])} axes", fix=f"write shape with 1 to {MAX_DIMS} sizes")
    return (tuple(p["shape"]),)


# ------------------------------------------------------------------------------------------------ shape


def heads(shapes: Shapes, p: Params) -> Shapes:
    return ((*shapes[0][:-1], *last(shapes[0]).split(p["n"], ("heads", "head_dim"))),)


def merge(shapes: Shapes, p: Params) -> Shapes:
    x = shapes[0]
    if len(x) < 3:
        raise GraphError(f"merge needs [tokens, heads, dim], it got {show(x)}", fix="heads(x, n) makes them")
    return ((*x[:-2], joined(x[-2], x[-1])),)


def split(shapes: Shapes, p: Params) -> Shapes:
    axis, sizes = last(shapes[0]), p["sizes"]
    bad = any(not isinstance(s, int) or s <= 0 for s in sizes)
    if bad or sum(sizes) != axis.size:
        raise GraphError(f"split sizes {list(sizes)} do not add up to {axis}", fix="check the widths of the parts")
    return tuple((*shapes[0][:-1], Axis(f"{axis.name}.{n}", s)) for n, s in enumerate(sizes))


def concat(shapes: Shapes, p: Params) -> Shapes:
    lead: Shape = shapes[0][:-1]
    for shape in shapes[1:]:
        if len(shape) != len(shapes[0]):
            reason = f"concat needs tensors with as many axes, it got {show(shapes[0])} and {show(shape)}"
            raise GraphError(reason, fix="heads(x, 1) adds an axis of one head, merge(x) takes the heads away")
        lead = broadcast(lead, shape[:-1])
    size = sum(last(s).size or 0 for s in shapes)
    return ((*lead, Axis("+".join(last(s).name for s in shapes), size)),)


def outer(shapes: Shapes, p: Params) -> Shapes:
    a, b = shapes
    if len(b) > 1 and a[:-1] != b[:-1]:
        reason = f"outer needs the same leading axes, it got {show(a)} and {show(b)}"
        raise GraphError(reason, fix="only the last axes may differ, or the second has one axis alone")
    return ((*a, last(b)),)


def counted(shapes: Shapes, p: Params) -> Shapes:
    if not 0 < p["n"] < MAX_RANGE:
        raise GraphError(f"range({p['n']})", fix="n is the size of an axis, a positive number")
    return ((Axis("range", p["n"]),),)


def same(shapes: Shapes, p: Params) -> Shapes:
    return (shapes[0],)


def reduced(shapes: Shapes, p: Params) -> Shapes:
    last(shapes[0])
    return ((*shapes[0][:-1], ONE),) if p["kind"] != "softmax" else (shapes[0],)


def limited(shapes: Shapes, p: Params) -> Shapes:
    for name, value in p.items():
        if value <= 0:
            raise GraphError(f"{name} is {value}", fix=f"{name} is positive; leave it out (None) for none")
    return (shapes[0],)


def binary(shapes: Shapes, p: Params) -> Shapes:
    return (broadcast(shapes[0], shapes[1]) if len(shapes) == 2 else shapes[0],)


def xielu(shapes: Shapes, p: Params) -> Shapes:
    numbers = p["alpha_p"] is not None and p["alpha_n"] is not None
    if len(shapes) != (1 if numbers else 3) or any(len(s) != 1 or last(s).size != 1 for s in shapes[1:]):
        raise GraphError(
            "xielu takes two alphas: numbers, or tensors of one element", fix="write xielu(x, alpha_p, alpha_n)"
        )
    return (shapes[0],)


# ------------------------------------------------------------------------------------------------ position and attention


def rope(shapes: Shapes, p: Params) -> Shapes:
    axis, dim = last(shapes[0]), p["dim"]
    if dim % 2 or dim <= 0 or dim > (axis.size or 0):
        raise GraphError(f"rope dim {dim} must be even and at most {axis}", fix="check rope.dim")
    return (shapes[0],)


def sdpa(shapes: Shapes, p: Params) -> Shapes:
    q, k, v = shapes[:3]
    if any(len(s) != 3 or s[0] != TOKENS for s in (q, k, v)):
        reason = f"sdpa needs q, k, v as [tokens, heads, dim], it got {show(q)}, {show(k)}, {show(v)}"
        raise GraphError(reason, fix="heads(q, n) makes them")
    if last(q).size != last(k).size:
        raise GraphError(f"q has {last(q)} and k has {last(k)}", fix="their head sizes must agree")
    if k[1].size != v[1].size or (q[1].size or 0) % (k[1].size or 1):
        reason = f"{q[1]} query heads, {k[1]} key heads and {v[1]} value heads do not fit"
        raise GraphError(reason, fix="k and v have as many heads, and q a multiple of that")
    if len(shapes) > 3 and (len(shapes[3]) != 1 or last(shapes[3]).size != q[1].size):
        reason = f"sinks must be one logit a head ({q[1]}), it has {show(shapes[3])}"
        raise GraphError(reason, fix="give the part shape = [the number of heads]")
    for name in ("window", "chunk", "softcap"):
        if p[name] is not None and p[name] <= 0:
            raise GraphError(f"{name} must be positive, it is {p[name]}", fix=f"leave {name} out for none")
    return ((q[0], q[1], last(v)),)


def sdpa_multiplies(shapes: Shapes, p: Params) -> int:
    return int(shapes[0][1].size or 0) * int((last(shapes[1]).size or 0) + (last(shapes[2]).size or 0))


# ------------------------------------------------------------------------------------------------ with a state


def conv(shapes: Shapes, p: Params) -> Shapes:
    if len(shapes[0]) != 2 or not 1 < p["kernel"] <= MAX_KERNEL:
        fix = f"call it with [tokens, channels]; the kernel has 2 to {MAX_KERNEL} places"
        raise GraphError(f"conv with kernel {p['kernel']} of {show(shapes[0])}", fix=fix)
    return (shapes[0],)


def conv_weights(shapes: Shapes, p: Params) -> list[tuple[str, Shape]]:
    weight = ("weight", (last(shapes[0]), Axis("kernel", p["kernel"])))
    return [weight, ("bias", (last(shapes[0]),))] if p["bias"] else [weight]


def recurrence(shapes: Shapes, p: Params) -> Shapes:
    q, k, v, decay = shapes[:4]
    if any(len(s) != 3 or s[0] != TOKENS for s in (q, k, v)) or q[1:] != k[1:] or (v[1].size or 0) % (k[1].size or 1):
        fix = "q and k are [tokens, groups, dk], v is [tokens, heads, dv], a group serves heads / groups heads"
        raise GraphError(f"recurrence of {show(q)}, {show(k)}, {show(v)}", fix=fix)
    sizes = tuple(a.size for a in decay[1:])
    if decay[:1] != (TOKENS,) or sizes not in ((v[1].size,), (v[1].size, last(k).size)):
        fix = "it is [tokens, heads] or [tokens, heads, dk]"
        raise GraphError(f"the decay {show(decay)} does not go with {show(v)}", fix=fix)
    if len(shapes) > 4 and tuple(a.size for a in shapes[4][1:]) != (v[1].size,):
        raise GraphError(f"beta {show(shapes[4])} does not go with {show(v)}", fix="it is [tokens, heads]")
    return (v,)


def recurrence_state(shapes: Shapes, p: Params) -> tuple[int, ...]:
    return (shapes[2][1].size or 0, last(shapes[1]).size or 0, last(shapes[2]).size or 0)


# ------------------------------------------------------------------------------------------------ experts


def router(shapes: Shapes, p: Params) -> Shapes:
    experts, k = last(shapes[0]), p["top_k"]
    if not 0 < k <= (experts.size or 0):
        raise GraphError(f"top_k {k} must be between 1 and {experts}", fix="check top_k")
    if len(shapes) > 1 and last(shapes[1]).size != experts.size:
        raise GraphError(f"the router's bias {show(shapes[1])} must have {experts}", fix="give it one number an expert")
    groups, top = p["groups"], p["top_groups"]
    if groups is not None and ((experts.size or 0) % groups or top is None or not 0 < top <= groups):
        raise GraphError(f"{experts} experts in {groups} groups, of which {top}", fix="check groups and top_groups")
    chosen = (*shapes[0][:-1], Axis("topk", k))
    return (chosen, chosen)


def combine(shapes: Shapes, p: Params) -> Shapes:
    y = shapes[0]
    if len(y) < 3 or any(w != y[:-1] for w in shapes[1:]):
        reason = f"combine needs y [tokens, topk, dim] and w [tokens, topk], it got {', '.join(map(show, shapes))}"
        raise GraphError(reason, fix="y comes from experts, w from router(…)")
    return ((*y[:-2], last(y)),)


def _make(
    name: str, doc: str, params: Mapping[str, str], inputs: tuple[int, int], infer: Any, **more: Any
) -> Primitive:
    return Primitive(name, doc, parse_signature(make_table(params)), inputs, infer, **more)


def _catalogue() -> Mapping[str, Primitive]:
    out = [
        _make("embed", "rows of a table, by integer ids (plus `offset`)", {"rows": "axis", "dim": "axis", "offset": "int = 0"},
              (1, 1), embed, weights=lambda s, p: [("weight", (p["rows"], p["dim"]))], owns_weights=True),
        _make("linear", "y = x·Wᵀ + b over the last axis; with `experts`, each token's chosen experts: part(x, ids)",
              {"out": "axis", "bias": "bool = False", "experts": "axis = None"}, (1, 2), linear, weights=linear_weights,
              multiplies=linear_multiplies, owns_weights=True),
        _make("norm", "RMS, layer (mean removed) or L2 normalisation over the last axis, times w (or 1 + w), plus b",
              {"kind": "rms | layer | l2 = rms", "eps": "number = 1e-5", "weight": "bool = True", "bias": "bool = False",
               "add_one": "bool = False", "per_head": "bool = False"}, (1, 1), normed, weights=norm_weights,
              multiplies=lambda s, p: 2 * count(s[0]), owns_weights=True),
        _make("param", "a tensor of the file, used as a value", {"shape": "list"}, (0, 0),
              stored, weights=lambda s, p: [("value", tuple(p["shape"]))], owns_weights=True),
        _make("act", "an activation or another function of one number", {"kind": "any"}, (1, 1), same,
              multiplies=lambda s, p: count(s[0])),
        _make("xielu", "activation with two learned alphas (arXiv 2411.13010): xielu(x, alpha_p, alpha_n)",
              {"alpha_p": "number = None", "alpha_n": "number = None", "beta": "number = 0.5", "eps": "number = -1e-6"},
              (1, 3), xielu, multiplies=lambda s, p: 3 * count(s[0])),
        _make("binary", "+ - * / ** min max with broadcasting over named axes; `number` is a constant right operand",
              {"kind": "any", "number": "number = None", "swap": "bool = False"}, (1, 2), binary,
              multiplies=lambda s, p: count(s[0])),
        _make("clamp", "min(max(x, -c), c)", {"limit": "number"}, (1, 1),
              limited, multiplies=lambda s, p: count(s[0]), vanishes=True),
        _make("softcap", "cap·tanh(x/cap)", {"cap": "number"}, (1, 1), limited, multiplies=lambda s, p: count(s[0]),
              vanishes=True),
        _make("reduce", "sum, mean, max (keeping an axis of size 1) or softmax over the last axis", {"kind": "any"}, (1, 1),
              reduced, multiplies=lambda s, p: count(s[0])),
        _make("heads", "the last axis cut into n heads", {"n": "int"}, (1, 1), heads),
        _make("merge", "the heads put together again", {}, (1, 1), merge),
        _make("split", "the last axis cut into parts of the given sizes", {"sizes": "list"}, (1, 1), split),
        _make("concat", "along the last axis; a single head is repeated for all", {}, (1, 64), concat),
        _make("outer", "[…, a] and […, b], or [b] alone -> […, a, b], every product", {}, (2, 2), outer),
        _make("range", "the vector 0, 1, … n − 1", {"n": "int"}, (0, 0), counted),
        _make("rope", "rotary positions on the first `dim` of the last axis (RoFormer, arXiv 2104.09864)",
              {"dim": "int", "theta": "number = 10000", "pairing": "half | inter = half",
               "kind": "default | linear | dynamic | ntk_alpha | yarn | bands | longrope | factors | proportional = default",
               "scaling": "any = None", "max_positions": "int = None", "original": "int = None",
               "truncate": "bool = True", "reverse": "bool = False"}, (2, 2), rope, multiplies=lambda s, p: 3 * count(s[0])),
        _make("sdpa", "causal attention over the sequence's cached keys and values; grouped heads, window (self included), "
              "chunk, softcap, one sink logit a head, alibi (its greatest bias, 8 in the paper: arXiv 2108.12409)",
              {"scale": "number", "window": "int = None", "chunk": "int = None", "softcap": "number = None",
               "alibi": "number = None", "alibi_scale": "number = 1",
               "alibi_dtype": "float32 | bfloat16 = float32"}, (4, 5), lambda s, p: sdpa((*s[:3], *s[4:]), p),
              multiplies=sdpa_multiplies, optional=("sinks",), token_wise=False),
        _make("conv", "causal depthwise convolution over the sequence: each channel sees its last `kernel` inputs",
              {"kernel": "int", "bias": "bool = False"}, (1, 1), conv, weights=conv_weights, owns_weights=True,
              multiplies=lambda s, p: count(s[0]) * int(p["kernel"]), token_wise=False,
              state=lambda s, p: (p["kernel"] - 1, last(s[0]).size or 0)),
        _make("recurrence", "recurrence(q, k, v, decay[, beta]): S ← decay·S + k·vᵀ, y = qᵀ·S, for each head; with beta the "
              "delta rule (state-space duality, arXiv 2405.21060; gated delta networks, arXiv 2412.06464)", {}, (4, 5),
              recurrence, multiplies=lambda s, p: 3 * math.prod(recurrence_state(s, p)), optional=("beta",), token_wise=False,
              state=recurrence_state),
        _make("router", "the top_k experts of each token and their weights: ids, w = router(logits[, bias])",
              {"top_k": "int", "score": "softmax | sigmoid | softmax_topk | sparsemixer = softmax", "normalise": "bool = False",
               "norm_min": "number = 1e-20", "scale": "number = 1", "groups": "int = None", "top_groups": "int = None",
               "group_score": "max | top2_sum = max", "jitter": "number = 0.01"}, (1, 2), router,
              multiplies=lambda s, p: 4 * count(s[0]), optional=("bias",)),
        _make("combine", "the experts' outputs added up, by their weights if given", {}, (1, 2), combine,
              multiplies=lambda s, p: count(s[0])),
        _make("select", "the rows whose logits are wanted (put in by the builder)", {}, (1, 1),
              lambda s, p: ((Axis("rows", None), *s[0][1:]),)),
    ]  # fmt: skip
    return MappingProxyType({p.name: p for p in out})


PRIMITIVES = _catalogue()


def cost(op: str, shapes: Shapes, params: Params) -> Cost:
    """What one node costs."""
    primitive = PRIMITIVES[op]
    weights = sum(count(shape) for _, shape in primitive.weights(shapes, params))
    if op == "embed":
        weights = int(params["dim"].size)  # one row is read
    elif op == "linear" and params["experts"] is not None:
        weights = linear_multiplies(shapes, params)
    flops = 2 * primitive.multiplies(shapes, params)
    if op == "sdpa":
        return Cost(0, flops, weights, count(shapes[1]) + count(shapes[2]))
    return Cost(flops, 0, weights)
