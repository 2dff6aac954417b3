"""Perplexity of a text, and how far one model's predictions are from another's, window by window.

The text's tokens are cut into windows of `ctx` without overlap, and what is left over is dropped. The first tokens of each
window are replaced by what the model wants before a text (BOS), where it wants something. Positions ctx//2 … ctx-2 of a window
are scored, each for how it predicts the token after it: ctx - 1 - ctx//2 of them, all with at least half a window before them.

Everything is NumPy on one window at a time; sums are float64. Two models with the same logits have a divergence of exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ArgumentError, InferflowError

__all__ = ["MIN_CTX", "Scores", "cut", "scored"]

MIN_CTX = 4  # the shortest window: one position is scored
ROWS = 16  # worked on at a time: temporaries of this many vocabularies

Array = np.ndarray


def scored(ctx: int) -> slice:
    """The positions of a window whose logits are scored."""
    return slice(ctx // 2, ctx - 1)


def cut(
    ids: Sequence[int],
    prefix: Sequence[int],
    ctx: int,
    limit: int | None = None,
    *,
    text: str = "text",
    width: str = "ctx",
) -> Array:
    """The windows of a text: int32 [windows, ctx], at most `limit`. `ids` are its tokens with `prefix` at their beginning.
    ArgumentError where there is not one window; it calls the text `text`, and what `ctx` is set by `width` (empty: nothing)."""
    shortest = max(MIN_CTX, 2 * len(prefix))
    if ctx < shortest:
        raise ArgumentError(f"a window of {ctx} tokens is too short", where=width or text, fix=f"it needs {shortest}")
    count = len(ids) // ctx
    if count == 0:
        reason = f"it has {len(ids)} tokens, fewer than one window of {ctx}"
        lower = f", or lower {width} to {len(ids)}" if width and len(ids) >= shortest else ""
        raise ArgumentError(reason, where=text, fix=f"give a longer text{lower}")
    windows = np.array(ids[: count * ctx], np.int32).reshape(count, ctx)[:limit]
    windows[:, : len(prefix)] = prefix
    return windows


@dataclass
class Scores:
    """What was measured so far, position by position: `nll` the negative log-likelihood of the token that came, in nats;
    against a base model also its own, the Kullback-Leibler divergence KL(base || model) in nats, and whether the likeliest
    token is the same. `model` and `against` are where the logits come from, for errors."""

    model: str = "evaluation"
    against: str = "evaluation"
    nll: list[Array] = field(default_factory=list)
    base_nll: list[Array] = field(default_factory=list)
    kld: list[Array] = field(default_factory=list)
    same_top: list[Array] = field(default_factory=list)

    def add(self, window: Array, logits: Array, base: Array | None = None) -> None:
        """`window` [ctx] of tokens; `logits`, and the base model's, float32 [scored positions, vocab].

        InferflowError where a logit is not finite."""
        targets = window[scored(len(window)).start + 1 :]
        for at in range(0, len(targets), ROWS):
            rows = slice(at, at + ROWS)
            with np.errstate(all="ignore"):  # what overflows is refused below
                self._add(targets[rows], logits[rows], None if base is None else base[rows])

    def _add(self, targets: Array, logits: Array, base: Array | None) -> None:
        here = np.arange(len(targets))
        b, exponentials = _normalise(logits, self.model)
        total = exponentials.sum(-1, dtype=np.float64)
        self.nll.append(np.log(total) - b[here, targets])
        if base is None:
            return
        a, exponentials = _normalise(base, self.against)
        base_total = exponentials.sum(-1, dtype=np.float64)
        # Σ p (a - b) - (A - B), where p is proportional to exp(a), and A and B are the logarithms of the sums
        mean = np.einsum("rv,rv->r", exponentials, a - b, dtype=np.float64) / base_total
        self.base_nll.append(np.log(base_total) - a[here, targets])
        self.kld.append(mean - (np.log(base_total) - np.log(total)))
        self.same_top.append(logits.argmax(-1) == base.argmax(-1))

    def report(self) -> dict[str, Any]:
        """The figures, by name. A standard error is None where there is only one value."""
        nll = np.concatenate(self.nll)
        out = {"scored": len(nll), **_perplexity("perplexity", nll)}
        if self.kld:
            kld = np.concatenate(self.kld)
            same = np.concatenate(self.same_top).astype(np.float64)
            out |= _perplexity("base_perplexity", np.concatenate(self.base_nll))
            out |= {
                "kld": float(kld.mean()),
                "kld_error": _standard_error(kld),
                "kld_p99_9": float(np.quantile(kld, 0.999)),
                "kld_max": float(kld.max()),
                "same_top": float(same.mean()),
                "same_top_error": _standard_error(same),
            }
        return out


def _normalise(logits: Array, where: str) -> tuple[Array, Array]:
    """logits minus their row's maximum, so that differences of what is left keep their digits, and exp of that: float32
    [rows, vocab], all finite."""
    top = logits.max(-1, keepdims=True)
    if not (np.isfinite(top).all() and np.isfinite(logits.min(-1)).all()):
        fix = "the weights or the saved logits are corrupt, or the spec is wrong"
        raise InferflowError("there are logits that are not finite", where=where, fix=fix)
    shifted = logits - top
    np.maximum(shifted, np.finfo(np.float32).min, out=shifted)
    return shifted, np.exp(shifted)


def _perplexity(name: str, nll: Array) -> dict[str, float | None]:
    """exp(mean), and its standard error by the delta method."""
    with np.errstate(over="ignore"):  # a model may be that bad: infinity
        error, value = _standard_error(nll), float(np.exp(nll.mean()))
    return {name: value, f"{name}_error": None if error is None else value * error}


def _standard_error(values: Array) -> float | None:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
