"""Primitives with a state per sequence: causal convolution and linear recurrence. NumPy, float32, one token at a time.

Each takes the state that the sequence's last token left (zeros at its start) and gives the outputs and the new state, so a
prompt may come in chunks of any size.
"""

from __future__ import annotations

import numpy as np

__all__ = ["causal_conv", "recurrence"]

Array = np.ndarray


def causal_conv(x: Array, w: Array, b: Array | None, state: Array) -> tuple[Array, Array]:
    """Depthwise: y[t, c] = Σ_j w[c, j]·x[t − kernel + 1 + j, c] (+ b[c]).

    x [tokens, channels], w [channels, kernel], `state` [kernel − 1, channels] the inputs before x, oldest first.
    """
    kernel = w.shape[1]
    seen = np.concatenate([state, x])
    y = seen[: len(x)] * w[:, 0]
    for j in range(1, kernel):
        y = y + seen[j : j + len(x)] * w[:, j]
    return (y if b is None else y + b), seen[len(x) :]


def recurrence(q: Array, k: Array, v: Array, decay: Array, beta: Array | None, state: Array) -> tuple[Array, Array]:
    """For each head and token: S ← decay·S + k·vᵀ, then y = qᵀ·S. With `beta` the delta rule: v is first replaced by
    β·(v − kᵀ·S), S already decayed (arXiv 2412.06464).

    q, k [tokens, groups, dk] (a group serves consecutive heads), v [tokens, heads, dv], decay [tokens, heads] or
    [tokens, heads, dk], beta [tokens, heads], state [heads, dk, dv] -> y [tokens, heads, dv].
    """
    heads = v.shape[1]
    q, k = (np.repeat(a, heads // a.shape[1], axis=1) for a in (q, k))
    decay = decay[:, :, None, None] if decay.ndim == 2 else decay[..., None]
    out = np.empty_like(v)
    for t in range(len(v)):
        state = state * decay[t]
        value = v[t]
        if beta is not None:
            value = (value - (k[t, :, :, None] * state).sum(1)) * beta[t, :, None]
        state = state + k[t, :, :, None] * value[:, None, :]
        out[t] = (q[t, :, :, None] * state).sum(1)
    return out, state
