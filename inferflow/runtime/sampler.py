"""Choosing the next tokens of a batch of sequences.

In this order: bias and penalties; forbidden tokens; temperature; the filters (`filters.choose`); a draw. Randomness is a
function of (seed, sequence index, position) alone, and a row's arithmetic does not touch the others': what runs beside a
sequence changes neither its tokens nor their log-probabilities.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import InferflowError, UnsupportedError
from ..kernels.native import Pool
from .filters import Scores, choose, draw, fold, largest, totals
from .penalties import AntiLM, Counts, Repeats, adjusts, forbidden, penalise
from .sampling_params import SamplingParams

__all__ = [
    "Constraint",
    "NotFiniteError",
    "Sampled",
    "SamplerState",
    "SamplingParams",
    "Top",
    "log_probabilities",
    "sample",
]

Array = np.ndarray
Top = tuple[tuple[int, float], ...]

RANDOM_FSD_TOKENS = 10


class Constraint(Protocol):
    """What the text may go on with: a structure that is being filled."""

    def mask(self) -> Array:
        """bool [vocab], true where a token may come. Raises InferflowError."""
        ...

    def push(self, token: int) -> None:
        """The text goes on with `token`. Raises InferflowError."""
        ...


class NotFiniteError(InferflowError):
    """The greatest logit is NaN or infinite."""


class Sampled(NamedTuple):
    """A token. `logprob` and `top` (the likeliest tokens with theirs) are set where the request asks for them, and are of the
    model's own distribution; `surprise` is the token's under the one it was drawn from, in bits, where mirostat asks."""

    token: int
    logprob: float | None = None
    top: Top = ()
    surprise: float = 0.0


class SamplerState:
    """What choosing one sequence's next token needs to know of it.

    It can be made again from (params, prompt, generated), so an answer survives preemption and restarts; but for mirostat,
    whose `mu` follows from the surprises of the tokens and must be handed on. `ends`: ids that end the text, which
    `min_tokens` forbids. `constraint`: the structure asked for, at its beginning. `ids`: the text so far.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], seed: int, index: int = 0, *, generated: Iterable[int] = (),
        ends: Collection[int] = (), constraint: Constraint | None = None, mu: float | None = None,
    ) -> None:  # fmt: skip
        if params.structured is not None and constraint is None:
            fix = "compile it with inferflow.runtime.structured"
            raise UnsupportedError("nothing holds the answer to it", where=params.structured[0], fix=fix)
        self.params = params
        self.seed = seed
        self.index = index
        self.ids = list(prompt)
        self.prompt = len(self.ids)
        self.ends = sorted({*ends, *params.stop_token_ids})
        self.constraint = constraint
        self.mu = 2 * params.mirostat_tau if mu is None else mu
        self.seen = Counts(self.ids) if params.repetition_penalty != 1 else None
        self.generated = Counts() if params.frequency_penalty != 0 or params.presence_penalty != 0 else None
        self.anti = AntiLM(params.fsd_n, params.fsd_beta, self.ids) if params.fsd_alpha > 0 else None
        self.repeats = Repeats(params, self.ids) if params.dry_multiplier > 0 else None
        self.adjusts = constraint is not None or adjusts(params)
        for token in generated:
            self._append(token)

    def push(self, sampled: Sampled) -> None:
        """The sequence goes on with `sampled`. Raises the constraint's InferflowError."""
        self._append(sampled.token)
        if self.params.mirostat:  # Basu et al. 2021, arXiv:2007.14966, version 2
            self.mu -= self.params.mirostat_eta * (sampled.surprise - self.params.mirostat_tau)

    def _append(self, token: int) -> None:
        self.ids.append(token)
        for followed in (self.seen, self.generated, self.anti, self.repeats):
            if followed is not None:
                followed.push(token)
        if self.constraint is not None and token not in self.ends:
            self.constraint.push(token)

    def uniform(self, draw: int = 0) -> float:
        """A number in [0, 1) for the next position. A hash of a counter, so there is no state to lose (Salmon et al. 2011)."""
        counter = b"%d %d %d %d" % (self.seed, self.index, len(self.ids), draw)
        return (int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little") >> 11) * 2.0**-53

    def changes_logits(self) -> bool:
        return self.adjusts or len(self.ids) - self.prompt < self.params.min_tokens

    def likeliest(self) -> bool:
        """Whether the next token is that of the greatest logit, and nothing else is asked for."""
        p = self.params
        return p.greedy and p.fsd_alpha == 0 and p.logprobs is None and not self.changes_logits()

    def adjusted(self, logits: Array) -> Array:
        """The logits after bias and penalties, forbidden tokens at -inf; a copy. Raises the constraint's InferflowError."""
        p, out = self.params, logits.copy()
        penalise(out, p, self.seen, self.generated, self.repeats)
        if p.allowed_token_ids is not None:
            rest = np.ones(len(out), bool)
            rest[list(p.allowed_token_ids)] = False
            out[rest] = -np.inf
        out[forbidden(p, self.ids)] = -np.inf
        if self.constraint is not None:
            mask = self.constraint.mask()
            out[: len(mask)][~mask[: len(out)]] = -np.inf
            out[len(mask) :] = -np.inf
        if len(self.ids) - self.prompt < p.min_tokens:
            out[self.ends] = -np.inf
        return out


def sample(logits: Array, states: Sequence[SamplerState], pool: Pool | None = None) -> list[Sampled | InferflowError]:
    """The next token of each row of `logits`, float32 [rows, vocab], which is left as it is; or why that row has none: it is
    not finite, or nothing is allowed. The states are not changed: `SamplerState.push` does that. `pool`: the engine's threads,
    which change no bit.

    Ids beyond the tokenizer's vocabulary are for the caller to mask, with -inf.
    """
    if all(state.likeliest() for state in states):  # one pass settles them
        best = logits.argmax(axis=1)  # where a NaN is, if there is one
        if np.isfinite(logits[np.arange(len(best)), best]).all():
            return [Sampled(token) for token in best.tolist()]
    own = fold(logits, pool)
    errors: dict[int, InferflowError] = {row: _not_finite() for row in np.flatnonzero(~np.isfinite(own.best)).tolist()}
    tokens, surprise = own.tokens.copy(), np.zeros(len(states))
    adjusted: dict[int, Array] = {}
    for row, state in enumerate(states):
        if row not in errors and state.changes_logits():
            try:
                adjusted[row] = state.adjusted(logits[row])
            except InferflowError as error:
                errors[row] = error
                continue
            tokens[row] = adjusted[row].argmax()
            if adjusted[row][tokens[row]] == -np.inf:
                errors[row] = _nothing_left()
    for kind, members in _kinds(states, errors).items():
        part = own.of(np.asarray(members))
        if not adjusted.keys().isdisjoint(members):
            part = fold(np.stack([adjusted.get(row, logits[row]) for row in members]), pool)
        tokens[members], surprise[members] = _KINDS[kind](part, [states[row] for row in members])
    asked = [row for row, s in enumerate(states) if s.params.logprobs is not None and row not in errors]
    counts = [states[row].params.logprobs or 0 for row in asked]
    told = dict(
        zip(asked, _log_probabilities(own.of(np.asarray(asked, int)), tokens[asked].tolist(), counts), strict=True)
    )
    out: list[Sampled | InferflowError] = []
    for row, (token, bits) in enumerate(zip(tokens.tolist(), surprise.tolist(), strict=True)):
        logprob, top = told.get(row, (None, ()))
        out.append(errors.get(row) or Sampled(token, logprob, top, bits))
    return out


def log_probabilities(logits: Array, tokens: Sequence[int], counts: Sequence[int]) -> list[tuple[float, Top]]:
    """Of each row of `logits` [rows, vocab]: the log-probability of its token, and the `counts` likeliest tokens with theirs
    (fewer where all others are impossible)."""
    return _log_probabilities(fold(logits), tokens, counts)


def _log_probabilities(scores: Scores, tokens: Sequence[int], counts: Sequence[int]) -> list[tuple[float, Top]]:
    if not len(tokens):
        return []
    best = largest(scores, np.asarray(counts)) if any(counts) else None
    norm = scores.best + np.log(totals(scores, np.ones(len(tokens))))  # float64
    own = (scores.rows.logits[scores.rows.at, tokens] - norm).tolist()
    if best is None:
        return [(logprob, ()) for logprob in own]
    there = np.minimum(counts, (best.logits > -np.inf).sum(axis=1)).tolist()
    ids, found = best.ids.tolist(), (best.logits - norm[:, None]).tolist()
    return [(own[row], tuple(zip(ids[row][:n], found[row][:n], strict=True))) for row, n in enumerate(there)]


# ---------------------------------------------------------------------- the kinds of rows

Chosen = tuple[Array, Array | float]
"""Tokens and surprises, [rows]."""


def _kinds(states: Sequence[SamplerState], errors: Collection[int]) -> dict[str, list[int]]:
    """The rows that the greatest logit does not settle, by how their token is found."""
    kinds: dict[str, list[int]] = {}
    for row, state in enumerate(states):
        kind = None if row in errors else _kind(state)
        if kind is not None:
            kinds.setdefault(kind, []).append(row)
    return kinds


def _kind(state: SamplerState) -> str | None:
    p = state.params
    sampled = p.fsd_random and len(state.ids) - state.prompt < RANDOM_FSD_TOKENS and state.uniform(1) < 0.5
    if p.fsd_alpha > 0 and not sampled:
        return "fsd"
    if p.greedy:
        return None
    if p.top_k <= 0 and (p.tfs_z < 1 or p.typical_p < 1):  # these sort the whole vocabulary
        return "sorted"
    return "filtered" if p.top_k > 0 or p.top_p < 1 or p.min_p > 0 or p.mirostat else "plain"


def _plain(scores: Scores, states: Sequence[SamplerState]) -> Chosen:
    heat = np.asarray([s.params.temperature for s in states])
    return draw(scores, heat, np.asarray([s.uniform() for s in states])), 0.0


def _filtered(scores: Scores, states: Sequence[SamplerState]) -> Chosen:
    mu = np.asarray([s.mu if s.params.mirostat else np.inf for s in states])
    return choose(scores, [s.params for s in states], mu, np.asarray([s.uniform() for s in states]))


def _fsd(scores: Scores, states: Sequence[SamplerState]) -> Chosen:
    heat = np.asarray([1.0 if s.params.greedy else s.params.temperature for s in states])
    best, total = largest(scores, np.asarray([s.params.fsd_k for s in states])), totals(scores, heat)
    likely = np.exp((best.logits - scores.best[:, None].astype(np.float64)) / heat[:, None]) / total[:, None]
    tokens = np.empty(len(states), np.int64)
    for row, state in enumerate(states):
        p, anti = state.params, state.anti
        ids = best.ids[row, : min(p.fsd_k, np.count_nonzero(likely[row]))].tolist()
        unlikely = np.asarray([anti.probability(token) if anti else 0.0 for token in ids])
        tokens[row] = ids[np.argmax((1 - p.fsd_alpha) * likely[row, : len(ids)] - p.fsd_alpha * unlikely)]
    return tokens, 0.0


_KINDS: dict[str, Callable[[Scores, Sequence[SamplerState]], Chosen]] = {
    "plain": _plain, "filtered": _filtered, "sorted": _filtered, "fsd": _fsd,
}  # fmt: skip


def _not_finite() -> NotFiniteError:
    fix = "the weights are corrupt, or the spec is wrong"
    return NotFiniteError("the model gives no finite logits", where="step", fix=fix)


def _nothing_left() -> InferflowError:
    fix = "allow more tokens, or ask for another structure"
    return InferflowError("no token is allowed here", where="step", fix=fix)
