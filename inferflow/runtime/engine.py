"""The step loop: schedule → run → sample → postprocess, over the sequences that are running.

Every running sequence gives one token a step, and what is left of the token budget is filled with chunks of prompts. A
sequence takes all the blocks it may ever need when it starts, so it can always finish.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from ..errors import ArgumentError, InferflowError
from ..graph.graph import Graph
from .batch import Span, StepBatch
from .executor import Cache, Executor
from .kv_cache import BlockPool
from .sampler import Constraint, NotFiniteError, Sampled, SamplerState, SamplingParams, sample

__all__ = ["Engine", "Event", "Sequence"]


@dataclass(eq=False)
class Sequence:
    """One request. `ids` is the prompt and what came after it; `past` how many of them are in the cache."""

    ids: list[int]
    params: SamplingParams
    limit: int  # tokens it may have in all
    sampler: SamplerState
    prompt: int
    past: int = 0
    blocks: list[int] = field(default_factory=list)
    finish: str | None = None
    inbox: deque[Event] = field(default_factory=deque)  # for its owner: who steps the engine may be somebody else


@dataclass(frozen=True)
class Event:
    """One new token of `sequence`, or its end (`token` None). `finish` is ``stop``, ``length``, or ``error`` (with `error`)
    on the last one."""

    sequence: Sequence
    token: int | None
    finish: str | None
    error: InferflowError | None = None


class Engine:
    """Sequences in, tokens out. Not thread-safe."""

    def __init__(
        self, graph: Graph, executor: Executor, *, max_len: int, eos: Collection[int] = (), slots: int = 8, budget: int = 512,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.executor = executor
        self.max_len = max_len
        self.eos = frozenset(eos)
        self.budget = budget
        self.block_size = executor.block_size
        blocks = -(-max_len // self.block_size) * slots
        self.pool = BlockPool(blocks)
        self.cache: Cache = executor.cache(blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(
        self, ids: list[int], params: SamplingParams, index: int = 0, constraint: Constraint | None = None
    ) -> Sequence:
        """Queue a prompt. Raises ArgumentError for an empty one, an id out of the vocabulary, or one that cannot fit."""
        self.check(ids)
        room = self.max_len - len(ids)
        wanted = params.max_tokens
        if room < (wanted or 1):
            more = f" and {wanted} new ones" if wanted else ""
            reason = f"{len(ids)} tokens{more} do not fit in {self.max_len}"
            raise ArgumentError(reason, where="prompt", fix="shorten it, lower max_tokens, or raise max_model_len")
        params.check_vocabulary(self.graph.vocab)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sampler = SamplerState(params, ids, seed, index, ends=self.eos, constraint=constraint)
        sequence = Sequence(list(ids), params, len(ids) + (wanted or min(128, room)), sampler, len(ids))
        self.waiting.append(sequence)
        return sequence

    def check(self, ids: list[int]) -> None:
        if not ids:
            raise ArgumentError("it has no tokens", where="prompt", fix="give at least one token")
        bad = [i for i in ids if not 0 <= i < self.graph.vocab]
        if bad:
            raise ArgumentError(
                f"token id {bad[0]} is not in the vocabulary", where="prompt", fix=f"ids go to {self.graph.vocab - 1}"
            )

    def step(self) -> list[Event]:
        """One step for all running sequences; what it produced. A step that raises has changed nothing."""
        work = self.schedule()
        if not work:
            return []
        batch, ready = self.batch(work)
        logits = self.executor.run(batch, self.cache)
        for sequence, count in work:
            sequence.past += count
        sampled = sample(logits, [sequence.sampler for sequence in ready])
        return [self.advance(sequence, token) for sequence, token in zip(ready, sampled, strict=True)]

    def run(self) -> Iterator[Event]:
        """Steps until nothing is left. Raises the error of a sequence that fails."""
        while self.waiting or self.running:
            for event in self.step():
                if event.error is not None:
                    raise event.error
                yield event

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence, wherever it is. Idempotent."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.give(sequence.blocks)
            self.cache.release(sequence.blocks)

    # ------------------------------------------------------------------ the four parts of a step

    def schedule(self) -> list[tuple[Sequence, int]]:
        """(sequence, tokens it gives): one for each that decodes, then chunks of prompts within the budget."""
        while self.waiting and self.fits(self.waiting[0]):
            sequence = self.waiting.popleft()
            sequence.blocks = self.pool.take(self.blocks_for(sequence))
            self.running.append(sequence)
        decoding = [s for s in self.running if len(s.ids) - s.past == 1]
        work = [(s, 1) for s in decoding]
        left = max(self.budget - len(work), 1)
        for sequence in self.running:
            todo = len(sequence.ids) - sequence.past
            if todo > 1 and left > 0:
                count = min(todo, left)
                work.append((sequence, count))
                left -= count
        return work

    def fits(self, sequence: Sequence) -> bool:
        return len(self.pool.free) >= self.blocks_for(sequence) and len(self.running) < self.cache.sequences

    def blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.limit // self.block_size)

    def batch(self, work: list[tuple[Sequence, int]]) -> tuple[StepBatch, list[Sequence]]:
        """The step batch of `work`, and the sequences whose logits it gives."""
        tokens: list[int] = []
        positions: list[int] = []
        spans, rows, ready = [], [], []
        for sequence, count in work:
            past = sequence.past
            spans.append(Span(len(tokens), count, past, tuple(sequence.blocks), sequence.limit))
            tokens += sequence.ids[past : past + count]
            positions += range(past, past + count)
            if past + count == len(sequence.ids):
                rows.append(len(tokens) - 1)
                ready.append(sequence)
        ids, where = np.asarray(tokens, np.int64), np.asarray(positions, np.int64)
        return StepBatch(ids, where, tuple(spans), np.asarray(rows, np.int64)), ready

    def advance(self, sequence: Sequence, sampled: Sampled | InferflowError) -> Event:
        """Take one token; finish on an end token or at the limit. An error ends this sequence, and no other."""
        if isinstance(sampled, Sampled):
            try:
                sequence.sampler.push(sampled)
            except InferflowError as error:
                sampled = error
        if isinstance(sampled, InferflowError):
            self.abort(sequence)
            sequence.finish = "error"
            if isinstance(sampled, NotFiniteError) and self.cache.kind == "f16":
                sampled.fix += "; or keys or values overflow the float16 cache: try kv='bf16' or kv='f32' (--kv bf16)"
            return Event(sequence, None, sequence.finish, sampled)
        token = sampled.token
        sequence.ids.append(token)
        ends = token in self.eos and not sequence.params.ignore_eos
        if ends or token in sequence.params.stop_token_ids:
            sequence.finish = "stop"
        elif len(sequence.ids) >= sequence.limit:
            sequence.finish = "length"
        if sequence.finish is not None:
            self.abort(sequence)
        return Event(sequence, token, sequence.finish)

    # ------------------------------------------------------------------ whole sequences, for research

    def forward(
        self, ids: list[int], names: list[str] | None = None, chunk: int | None = None, positions: slice = slice(None)
    ) -> dict[str, np.ndarray]:
        """Logits of `positions` (under ``logits``), and the named tensors, of one sequence run `chunk` tokens at a time."""
        self.check(ids)
        if len(ids) > self.max_len:
            raise ArgumentError(
                f"{len(ids)} tokens do not fit in {self.max_len}", where="prompt", fix="raise max_model_len"
            )
        rows = np.arange(len(ids))[positions]
        parts: dict[str, list[np.ndarray]] = {}
        blocks = self.pool.take(-(-len(ids) // self.block_size))
        try:
            for past in range(0, len(ids), chunk or len(ids)):
                piece = np.asarray(ids[past : past + (chunk or len(ids))], np.int64)
                where = np.arange(past, past + len(piece))
                span = Span(0, len(piece), past, tuple(blocks), len(ids))
                here = rows[(rows >= past) & (rows < past + len(piece))] - past
                batch = StepBatch(piece, where, (span,), here)
                if names is None:
                    out = {"logits": self.executor.run(batch, self.cache).copy()}
                else:
                    out = self.executor.capture(batch, self.cache, names)
                for name, array in out.items():
                    parts.setdefault(name, []).append(array)
        finally:
            self.pool.give(blocks)
            self.cache.release(blocks)
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}
