"""Which sequences a step runs, with how many tokens each, in which blocks.

All sequences are ranked by the policy; the best `width` of them are active. A step takes the next token of each that decodes,
and fills what is left of its token budget with chunks of prompts: long ones are split and short ones composed (dynamic
SplitFuse, arXiv 2401.08671). One walk in the order of rank gives out blocks, and takes them from the worst where there are none
left, so the best always goes on, and every sequence ends.

Nothing is ever moved: a sequence keeps its blocks and its slot, kernels find both by number, and a step's arrays are written
anew. So the fewest moves that compact the running sequences are none.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import islice

from ..errors import ArgumentError
from ..spec.expression import show
from .blocks import BlockPool, chain
from .executor import Cache
from .policies import Policy
from .policies import policy as policy_of
from .sampling_params import whole
from .sequence import Sequence
from .swap import SwapFile, copy_block

__all__ = ["Options", "Scheduler", "Totals", "Work"]

Work = list[tuple[Sequence, int]]

SHARE = 4  # one part in so many of what is left of a step goes past a long prompt


@dataclass(frozen=True)
class Options:
    """How the loop chooses. `budget`: tokens of a step; `width`: the most sequences of a step (None: what the budget and the
    cache allow); `policy`: a name of `POLICIES`, or a policy; `prefill_first`: prompts stop all that decodes, a baseline;
    `prefix_cache`: known prefixes are not computed again (never with states, which are not in blocks); `swap_bytes`: of the
    file that preempted sequences go to, 0 to compute them again; `max_waiting` requests and `max_waiting_tokens` may wait."""

    budget: int = 512
    width: int | None = None
    policy: str | Policy = "fcfs"
    prefill_first: bool = False
    prefix_cache: bool = True
    swap_bytes: int = 0
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None

    def __post_init__(self) -> None:
        policy_of(self.policy)
        least = {"budget": 1, "width": 1, "swap_bytes": 0, "max_waiting": 1, "max_waiting_tokens": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            optional = name not in ("budget", "swap_bytes")
            if not whole(value, smallest) and not (optional and value is None):
                fix = f"it must be a whole number from {smallest}" + " or None" * optional
                raise ArgumentError(f"it is {show(value)}", where=name, fix=fix)


@dataclass
class Totals:
    """What has happened so far, in numbers that only grow. `cached`: tokens that a known prefix saved of the `asked` ones of
    prompts that started."""

    steps: int = 0
    decoded: int = 0
    prefilled: int = 0
    asked: int = 0
    cached: int = 0
    preempted: int = 0
    swapped: int = 0


class Scheduler:
    """`waiting` is sorted by rank; `running` are the sequences that have a slot, and blocks, in no order."""

    def __init__(self, pool: BlockPool, cache: Cache, block_size: int, options: Options) -> None:
        self.pool = pool
        self.cache = cache
        self.block_size = block_size
        self.policy = policy_of(options.policy)
        self.key = self.policy.key
        self.budget = options.budget
        limits = (options.budget, options.width, self.policy.width, cache.sequences)
        self.width = min(limit for limit in limits if limit is not None)
        self.prefill_first = options.prefill_first
        self.shares = options.prefix_cache and not cache.states
        self.swap = SwapFile(cache, options.swap_bytes) if options.swap_bytes else None
        self.slots = list(range(cache.sequences - 1, -1, -1))
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.waiting_tokens = 0
        self.since: deque[tuple[int, Sequence]] = deque()  # when they began to wait, if the policy has patience
        self.totals = Totals()

    def add(self, sequence: Sequence) -> None:
        sequence.last = self.totals.steps
        self.policy.arrive(sequence)
        self._wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has ended, wherever it was. Idempotent."""
        if sequence.slot is not None:
            self._leave(sequence)
        elif self._waits(sequence):
            self._stop_waiting(sequence)
        if self.swap and sequence.saved:
            self.swap.drop(sequence.saved)
        sequence.saved = None

    def schedule(self) -> Work:
        """(sequence, tokens it gives): those that decode, then chunks of prompts. Never more than the budget.

        A long prompt leaves a quarter of what it could take to those behind it: a short one need not wait for its end."""
        self._promote()
        active = self._active()
        left = self.budget - (0 if self.prefill_first else sum(s.todo == 1 for s in active))
        behind = sum(s.todo for s in active if s.todo > 1)
        decodes: Work = []
        prompts: Work = []
        preempted, opens = self.totals.preempted, True
        here = {id(sequence) for sequence in active}
        paused = [s for s in sorted(self.running, key=self.key) if id(s) not in here]
        for sequence in [*active, *paused]:  # those that pause take the place of some that cannot start
            if len(decodes) + len(prompts) == self.width:
                break
            counted = sequence.todo == 1 and id(sequence) in here
            behind -= 0 if counted or id(sequence) not in here else sequence.todo
            if not counted and not left:
                continue
            if sequence.slot is None and id(sequence) in here:
                # Whoever lost its blocks in this step must not take them back in it; and nobody overtakes in a queue.
                opens = opens and self.totals.preempted == preempted and self._start(sequence)
            if sequence.slot is None or not self._grow(sequence):
                continue
            count = 1 if counted else min(sequence.todo, left - min(left // SHARE, max(behind, 0)))
            left -= 0 if counted else count
            (decodes if counted or sequence.todo == 1 else prompts).append((sequence, count))
        work = prompts or decodes if self.prefill_first else decodes + prompts
        if self.policy.proactive and self.swap:
            self._make_way(work)
        return work

    def ran(self, work: Work) -> None:
        """The tokens of `work` are in the cache."""
        self.totals.steps += 1
        for sequence, count in work:
            if count == 1:
                self.totals.decoded += 1
            else:
                self.totals.prefilled += count
            sequence.past += count
            sequence.last = self.totals.steps
            sequence.begun = sequence.begun and sequence.todo > 0
            self.policy.ran(sequence, count)
            self._remember(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks and its slot; it waits to go on, from the file or by being computed again."""
        self.totals.preempted += 1
        used = sequence.blocks[: self.blocks_for(sequence.past)]
        if self.swap and used and sequence.slot is not None:
            sequence.saved = self.swap.save(used, sequence.slot)
        if sequence.saved:
            self.totals.swapped += 1
        else:
            sequence.past = 0
        self._leave(sequence)
        self._wait(sequence)

    def lend(self, count: int) -> tuple[list[int], int]:
        """Blocks and a slot for a run beside the loop, whose sequences make way: `unlend` them."""
        while self.running and (len(self.pool.free) < count or not self.slots):
            self.preempt(max(self.running, key=self.key))
        return self.pool.take(count), self.slots.pop()

    def unlend(self, blocks: list[int], slot: int) -> None:
        self.pool.give(blocks)
        self.slots.append(slot)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _active(self) -> list[Sequence]:
        """The best of all, by rank, but for those whose parent has still to compute what they will share."""
        waiting = self.waiting if self.policy.admits(len(self.running)) else []
        startable = (s for s in waiting if not self._expects(s))
        return list(islice(heapq.merge(sorted(self.running, key=self.key), startable, key=self.key), self.width))

    # ------------------------------------------------------------------ starting, growing, leaving

    def _start(self, sequence: Sequence) -> bool:
        """Make it resident, with blocks for all its tokens; each of the better ones that will grow can have one more."""
        shared, past = self._shared(sequence)
        self.pool.share(shared)
        if self.swap and sequence.saved and not self.swap.holds(sequence.saved):
            sequence.saved, sequence.past = None, 0
        need = self.blocks_for(len(sequence.ids)) - len(shared)
        copies = past % self.block_size > 0
        better = (other for other in self.running if self.key(other) < self.key(sequence))
        growing = sum(self.blocks_for(other.limit) > len(other.blocks) for other in better)
        if not self._room(sequence, need + copies + growing):
            self.pool.give(shared)
            return False
        self._stop_waiting(sequence)
        sequence.slot = self.slots.pop()
        sequence.blocks = shared + self.pool.take(need)
        self.running.append(sequence)
        if self.swap and sequence.saved:
            self.swap.load(sequence.saved, sequence.blocks[: self.blocks_for(sequence.past)], sequence.slot)
            sequence.saved = None
        else:
            sequence.past = past
        if sequence.cached is None:
            sequence.cached = past
            self.totals.asked += sequence.prompt
            self.totals.cached += past
        sequence.remembered = past // self.block_size
        sequence.begun, sequence.parent = True, None
        return True

    def _shared(self, sequence: Sequence) -> tuple[list[int], int]:
        """Blocks that hold its first tokens, and how many tokens. At least one is left to compute, for its logits."""
        if not self.shares or sequence.saved or sequence.unscored:
            return [], 0
        full = (len(sequence.ids) - 1) // self.block_size
        known = self.pool.find(self._digests(sequence, full))
        parent = sequence.parent
        if parent is not None and parent.slot is not None:
            common = min(parent.past, sequence.common)
            if common > len(known) * self.block_size:
                return parent.blocks[: self.blocks_for(common)], common
        return known, len(known) * self.block_size

    def _expects(self, sequence: Sequence) -> bool:
        """Whether its parent has still to compute what it will share."""
        parent = sequence.parent
        return self.shares and parent is not None and parent.finish is None and parent.past < sequence.common

    def _grow(self, sequence: Sequence) -> bool:
        """A block of its own where its next token goes: a new one at the end, or a copy of one that it shares."""
        at = sequence.past // self.block_size
        if at < len(sequence.blocks) and self.pool.references[sequence.blocks[at]] == 1:
            # A fork's, if the other made way for it: it is known for what the other had written.
            self.pool.forget(sequence.blocks[at])
            return True
        if not self._room(sequence, 1):
            return False
        fresh = self.pool.take(1)
        if at < len(sequence.blocks):
            copy_block(self.cache, sequence.blocks[at], fresh[0])
            self.pool.give(sequence.blocks[at : at + 1])
        sequence.blocks[at : at + 1] = fresh
        return True

    def _room(self, sequence: Sequence, count: int) -> bool:
        """Whether so many blocks are free (and a slot, if it has none), if need be after preempting worse sequences; none where
        all of theirs would not be enough."""
        if len(self.pool.free) >= count and (self.slots or sequence.slot is not None):
            return True
        worse = sorted((r for r in self.running if self.key(r) > self.key(sequence)), key=self.key)
        if not worse or len(self.pool.free) + sum(len(r.blocks) for r in worse) < count:
            return False
        while worse and (len(self.pool.free) < count or not (self.slots or sequence.slot is not None)):
            self.preempt(worse.pop())
        return len(self.pool.free) >= count

    def _make_way(self, work: Work) -> None:
        """Free the blocks of those that pause before others want them (FastServe's proactive swapping)."""
        at_work = {id(sequence) for sequence, _ in work}
        idle = sorted((s for s in self.running if id(s) not in at_work), key=self.key)
        while idle and len(self.pool.free) < len(work):
            self.preempt(idle.pop())

    def _leave(self, sequence: Sequence) -> None:
        self.pool.give(sequence.blocks)
        sequence.blocks = []
        if sequence.slot is not None:
            self.slots.append(sequence.slot)
        sequence.slot, sequence.begun = None, False
        sequence.remembered = 0
        self.running.remove(sequence)

    # ------------------------------------------------------------------ waiting

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=self.key)
        self.waiting_tokens += len(sequence.ids)
        if self.policy.patience is not None:
            self.since.append((self.totals.steps, sequence))

    def _waits(self, sequence: Sequence) -> bool:
        at = bisect_left(self.waiting, self.key(sequence), key=self.key)
        return at < len(self.waiting) and self.waiting[at] is sequence

    def _stop_waiting(self, sequence: Sequence) -> None:
        del self.waiting[bisect_left(self.waiting, self.key(sequence), key=self.key)]
        self.waiting_tokens -= len(sequence.ids)

    def _promote(self) -> None:
        """Those that no step has run for as long as the policy has patience."""
        if self.policy.patience is None:
            return
        due = self.totals.steps - self.policy.patience
        starved = [s for s in self.running if s.last <= due]
        while self.since and self.since[0][0] <= due:
            sequence = self.since.popleft()[1]
            if sequence.last <= due and self._waits(sequence):
                starved.append(sequence)
        for sequence in starved:
            waits = sequence.slot is None
            if waits:
                self._stop_waiting(sequence)
            self.policy.promote(sequence)
            sequence.last = self.totals.steps
            if waits:
                self._wait(sequence)

    # ------------------------------------------------------------------ known prefixes

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """Those of its first `count` blocks."""
        own, size = sequence.digests, self.block_size
        for n in range(len(own), count):
            own.append(chain(own[-1] if own else sequence.root, sequence.ids[n * size : (n + 1) * size]))
        return own[:count]

    def _remember(self, sequence: Sequence) -> None:
        """Its full blocks are known from now on."""
        full = sequence.past // self.block_size
        if self.shares and full > sequence.remembered:
            digests = self._digests(sequence, full)
            for n in range(sequence.remembered, full):
                self.pool.remember(sequence.blocks[n], digests[n])
            sequence.remembered = full
