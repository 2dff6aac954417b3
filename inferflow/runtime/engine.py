"""The step loop: schedule → run → sample → postprocess, over all sequences at once, token by token.

A sequence joins at the step after it was added, wherever the others are, and leaves as soon as it ends.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from ..errors import ArgumentError, DeadlineError, InferflowError, QueueFullError
from ..graph.graph import Graph
from ..kernels.rope import rope_length
from .batch import Span, StepBatch
from .blocks import BlockPool, root
from .executor import Cache, Executor
from .memory import free_memory, plan_memory
from .sampler import (
    Constraint,
    NotFiniteError,
    Sampled,
    SamplerState,
    SamplingParams,
    log_probabilities,
    sample,
)
from .scheduler import Options, Scheduler, Work
from .sequence import Event, Sequence

__all__ = ["Engine", "Event", "Options", "Sequence"]

DEFAULT_TOKENS = 128  # new ones of a request that does not say how many


class Engine:
    """Sequences in, tokens out. Not thread-safe.

    `max_len`: tokens of the longest sequence. The cache has `blocks` blocks; None: for `slots` sequences of that length, as
    far as memory is free. `plan` says which, in a sentence. `clock` gives the seconds that deadlines are of. Of the logits the
    first `vocab` count: what is beyond the tokenizer's vocabulary was never trained.
    """

    def __init__(
        self,
        graph: Graph,
        executor: Executor,
        *,
        max_len: int,
        eos: Collection[int] = (),
        slots: int = 8,
        blocks: int | None = None,
        options: Options | None = None,
        clock: Callable[[], float] = time.monotonic,
        vocab: int | None = None,
    ) -> None:
        self.graph = graph
        self.executor = executor
        self.max_len = max_len
        self.eos = frozenset(eos)
        self.options = options or Options()
        self.clock = clock
        self.vocab = min(vocab or graph.vocab, graph.vocab)
        self.block_size = executor.block_size
        self.plan = plan_memory(executor.block_bytes, self.block_size, max_len, slots, blocks, free_memory())
        self.pool = BlockPool(self.plan.blocks)
        self.cache: Cache = executor.cache(self.plan.blocks)
        self.scheduler = Scheduler(self.pool, self.cache, self.block_size, self.options)
        self.waiting, self.running = self.scheduler.waiting, self.scheduler.running
        self.arrivals = itertools.count()
        self.deadlines: list[tuple[float, int, Sequence]] = []
        self.work: Work = []  # of the last step
        self.began = 0.0  # when that step did, by the clock
        self.ropes = [node.params for node in graph.nodes if node.op == "rope"]

    def again(self) -> Engine:
        """A new one with the same settings and an empty cache."""
        return Engine(
            self.graph, self.executor, max_len=self.max_len, eos=self.eos, blocks=self.plan.blocks,
            options=self.options, clock=self.clock, vocab=self.vocab,
        )  # fmt: skip

    def add(
        self,
        ids: list[int],
        params: SamplingParams,
        index: int = 0,
        *,
        priority: int = 0,
        deadline: float | None = None,
        extras: Mapping[str, object] | None = None,
        constraint: Constraint | None = None,
    ) -> Sequence:
        """Queue a prompt; `index` is the answer's number among those with the same seed. The smallest `priority` goes first,
        where the policy looks at it. After `deadline`, of the engine's clock, the sequence ends with DeadlineError. Prompts
        with other `extras`, such as ``{"cache_salt": …}``, share no prefix. `constraint`: the structure that `params` asks for.

        Raises ArgumentError for an empty prompt, an id out of the vocabulary, or one that can never fit; QueueFullError.
        """
        self.check(ids)
        limit = self._limit(len(ids), params.max_tokens)
        self._check_queue(len(ids))
        params.check_vocabulary(self.vocab)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sampler = SamplerState(params, ids, seed, index, ends=self.eos, constraint=constraint)
        sequence = Sequence(sampler.ids, params, limit, sampler, len(ids), next(self.arrivals), priority, deadline)
        # Keys that were rotated for a shorter sequence are not those of a longer one, where the scaling looks at the length.
        lengths = [rope_length(rope, limit) for rope in self.ropes]
        sequence.root = root({"extras": dict(extras or {}), "rope_lengths": lengths})
        if params.prompt_logprobs is not None:
            sequence.prompt_logprobs = []
        self._enter(sequence)
        return sequence

    def fork(
        self, parent: Sequence, index: int, ids: list[int] | None = None, constraint: Constraint | None = None
    ) -> Sequence:
        """Another answer to the prompt of `parent`; or one that goes on from `ids`, as a beam does. Blocks of what both have in
        common are shared, once they are computed, and copied when one of the two writes. Raises QueueFullError, but for the
        fork of what has started: that was admitted."""
        own = list(parent.ids[: parent.prompt] if ids is None else ids)
        self.check(own)
        if parent.started is None:
            self._check_queue(len(own))
        sampler = SamplerState(
            parent.params, own[: parent.prompt], parent.sampler.seed, index, generated=own[parent.prompt :], ends=self.eos,
            constraint=constraint,
        )  # fmt: skip
        sequence = Sequence(
            sampler.ids,
            parent.params,
            parent.limit,
            sampler,
            parent.prompt,
            next(self.arrivals),
            parent.priority,
            parent.deadline,
        )
        sequence.root = parent.root
        differ = (n for n, (a, b) in enumerate(zip(own, parent.ids, strict=False)) if a != b)
        sequence.parent, sequence.common = parent, min(next(differ, len(own)), len(parent.ids), len(own) - 1)
        self._enter(sequence)
        return sequence

    def _limit(self, prompt: int, wanted: int | None) -> int:
        """Tokens that a sequence with such a prompt may come to have. Raises ArgumentError where they can never fit."""
        room = self.max_len - prompt
        if room < (wanted or 1):
            more = f" and {wanted} new ones" if wanted else ""
            reason = f"{prompt} tokens{more} do not fit in {self.max_len}"
            raise ArgumentError(reason, where="prompt", fix="shorten it, lower max_tokens, or raise max_model_len")
        limit = prompt + (wanted or min(DEFAULT_TOKENS, room))
        need = self.scheduler.blocks_for(limit)
        if need > self.pool.blocks:
            reason = f"{limit} tokens need {need} blocks of {self.block_size}, and the cache has {self.pool.blocks}"
            fix = "shorten it, lower max_tokens, or give the cache more blocks"
            raise ArgumentError(reason, where="prompt", fix=fix)
        return limit

    def check(self, ids: list[int]) -> None:
        """Raises ArgumentError for no tokens, or one that the model has not."""
        if not ids:
            raise ArgumentError("it has no tokens", where="prompt", fix="give at least one token")
        bad = [i for i in ids if not 0 <= i < self.graph.vocab]
        if bad:
            raise ArgumentError(
                f"token id {bad[0]} is not in the vocabulary", where="prompt", fix=f"ids go to {self.graph.vocab - 1}"
            )

    def _check_queue(self, tokens: int) -> None:
        waiting, most = len(self.waiting), self.options.max_waiting
        if most is not None and waiting >= most:
            raise QueueFullError(f"{waiting} requests are waiting, of {most} that may", fix="ask again later")
        queued, most = self.scheduler.waiting_tokens, self.options.max_waiting_tokens
        if most is not None and waiting and queued + tokens > most:
            reason = f"{queued} tokens are waiting, of {most} that may, and {tokens} more would come"
            raise QueueFullError(reason, fix="ask again later")

    def _enter(self, sequence: Sequence) -> None:
        sequence.arrived = self.clock()
        self.scheduler.add(sequence)
        if len(self.deadlines) > 64 + 2 * (len(self.waiting) + len(self.running)):  # most have ended
            self.deadlines = [entry for entry in self.deadlines if entry[2].finish is None]
            heapq.heapify(self.deadlines)
        if sequence.deadline is not None:
            heapq.heappush(self.deadlines, (sequence.deadline, sequence.arrival, sequence))

    def step(self) -> list[Event]:
        """One step for all running sequences; what it produced. After one that raises, the next does the same work."""
        self.work = work = self.scheduler.schedule()
        if not work:
            return self.expire()
        self._start(work)
        batch, ready = step_batch(work)
        logits = self.executor.run(batch, self.cache)
        logits[:, self.vocab :] = -np.inf
        if len(batch.rows) > len(ready):
            logits = score(work, logits)
        sampled = sample(logits, [sequence.sampler for sequence in ready], self.executor.pool)
        self.scheduler.ran(work)
        return [self.advance(sequence, one) for sequence, one in zip(ready, sampled, strict=True)] + self.expire()

    def _start(self, work: Work) -> None:
        self.began = self.clock()
        for sequence, _ in work:
            if sequence.started is None:
                sequence.started = self.began

    def run(self) -> Iterator[Event]:
        """Steps until nothing is left. Raises the error of a sequence that fails."""
        while self.waiting or self.running:
            for event in self.step():
                if event.error is not None:
                    raise event.error
                yield event

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence, wherever it is. Idempotent. Its full blocks are still known to who comes with the same prefix."""
        self.end(sequence, "abort")

    def fail(self, error: InferflowError) -> list[Event]:
        """End all that runs or waits with `error`, and touch nothing else: the engine may be in the midst of a step that nobody
        will finish. It is of no more use."""
        sequences = [*self.waiting, *self.running]
        self.waiting.clear()
        self.running.clear()
        for sequence in sequences:
            sequence.finish = "error"
        return [Event(sequence, None, "error", error) for sequence in sequences]

    def end(self, sequence: Sequence, finish: str) -> None:
        if sequence.finish is None:
            self.scheduler.remove(sequence)
            sequence.finish, sequence.parent = finish, None

    # ------------------------------------------------------------------ after a step

    def advance(self, sequence: Sequence, sampled: Sampled | InferflowError) -> Event:
        """Take one token; finish on an end token or at the limit. An error ends this sequence, and no other."""
        if isinstance(sampled, Sampled):
            try:
                sequence.sampler.push(sampled)
            except InferflowError as error:
                sampled = error
        if isinstance(sampled, InferflowError):
            self.end(sequence, "error")
            if isinstance(sampled, NotFiniteError) and self.cache.kind == "f16":
                sampled.fix += "; or keys or values overflow the float16 cache: try kv='bf16' or kv='f32' (--kv bf16)"
            return Event(sequence, None, "error", sampled)
        token = sampled.token
        sequence.latest = self.clock()
        if sequence.first is None:
            sequence.first = sequence.latest
        ends = token in self.eos and not sequence.params.ignore_eos
        if ends or token in sequence.params.stop_token_ids:
            self.end(sequence, "stop")
        elif len(sequence.ids) >= sequence.limit:
            self.end(sequence, "length")
        return Event(sequence, token, sequence.finish, None, sampled.logprob, sampled.top)

    def expire(self) -> list[Event]:
        """End what is past its deadline."""
        events = []
        while self.deadlines and self.deadlines[0][0] <= self.clock():
            sequence = heapq.heappop(self.deadlines)[2]
            if sequence.finish is None:
                self.end(sequence, "deadline")
                reason = f"the time is up after {len(sequence.ids) - sequence.prompt} new tokens"
                error = DeadlineError(reason, where="timeout", fix="allow more time, or lower max_tokens")
                events.append(Event(sequence, None, "deadline", error))
        return events

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
        blocks, slot = self.scheduler.lend(self.scheduler.blocks_for(len(ids)))
        try:
            for past in range(0, len(ids), chunk or len(ids)):
                piece = np.asarray(ids[past : past + (chunk or len(ids))], np.int64)
                where = np.arange(past, past + len(piece))
                span = Span(0, len(piece), past, tuple(blocks), len(ids), slot)
                here = rows[(rows >= past) & (rows < past + len(piece))] - past
                batch = StepBatch(piece, where, (span,), here)
                if names is None:
                    out = {"logits": self.executor.run(batch, self.cache).copy()}
                else:
                    out = self.executor.capture(batch, self.cache, names)
                for name, array in out.items():
                    parts.setdefault(name, []).append(array)
        finally:
            self.scheduler.unlend(blocks, slot)
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def step_batch(work: Work) -> tuple[StepBatch, list[Sequence]]:
    """The step batch of (sequence, tokens it gives), and the sequences that it gives a new token."""
    tokens: list[int] = []
    positions: list[int] = []
    spans, rows, ready = [], [], []
    for sequence, count in work:
        past = sequence.past
        slot = sequence.slot or 0
        spans.append(Span(len(tokens), count, past, tuple(sequence.blocks), sequence.limit, slot))
        rows += [len(tokens) + row for row in logit_rows(sequence, count)]
        tokens += sequence.ids[past : past + count]
        positions += range(past, past + count)
        if past + count == len(sequence.ids):
            ready.append(sequence)
    ids, where = np.asarray(tokens, np.int64), np.asarray(positions, np.int64)
    return StepBatch(ids, where, tuple(spans), np.asarray(rows, np.int64)), ready


def logit_rows(sequence: Sequence, count: int) -> range:
    """Which of the next `count` tokens of `sequence` need logits: all of a prompt that is to be scored, or the newest."""
    if sequence.unscored:
        return range(count)
    return range(count - 1, count) if sequence.todo == count else range(0)


def score(work: Work, logits: np.ndarray) -> np.ndarray:
    """Append to `Sequence.prompt_logprobs` what the step tells; the rows of `logits` that give new tokens."""
    at, ready = 0, []
    for sequence, count in work:
        rows = len(logit_rows(sequence, count))
        scores, past = sequence.prompt_logprobs, sequence.past
        if scores is not None and sequence.unscored:  # one that was preempted has some already
            first, end = len(scores), min(past + count, sequence.prompt - 1)
            tokens = sequence.ids[first + 1 : end + 1]
            counts = [sequence.params.prompt_logprobs or 0] * len(tokens)
            told = log_probabilities(logits[at + first - past : at + end - past], tokens, counts)
            scores += [(token, *one) for token, one in zip(tokens, told, strict=True)]
        at += rows
        if sequence.todo == count:
            ready.append(at - 1)
    return logits[ready]
