"""Whatever the loop does to a sequence, its tokens are those that it has alone, and its logits the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferflow import LLM
from inferflow.errors import InferflowError
from inferflow.kernels import native
from inferflow.runtime import engine as engine_module
from inferflow.runtime.engine import Engine, Options, Sequence
from inferflow.runtime.policies import MultiLevelFeedbackQueue
from inferflow.runtime.sampler import Sampled, SamplerState, SamplingParams
from tests import tiny
from tests.parity.oracle import oracle
from tests.parity.table import ROWS

CONFIG = {**tiny.CONFIG, "vocab_size": 101, "max_position_embeddings": 512}
NEW = 20
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.2, top_p=0.95, seed=17)
Add = Callable[[int], Sequence]


def make_prompts(unit: int) -> list[list[int]]:
    """In quarters of a block: two with a stem in common, one of whole blocks, one of a token, others of any length."""
    rng = np.random.default_rng(3)
    stem, *others = ([int(i) for i in rng.integers(3, 99, n * unit + 1)] for n in (9, 2, 4, 5))
    return [stem, [*stem[: 8 * unit + 1], 7, 8, 9], stem[unit : 5 * unit], [5], *others]


@dataclass
class Subject:
    """A model with the answers that it gives to each prompt alone; `logits` by the ids before them, as bytes."""

    llm: LLM
    options: dict[str, Any]
    prompts: list[list[int]]
    logits: dict[tuple[int, ...], bytes] = field(default_factory=dict)
    alone: list[list[int]] = field(default_factory=list)

    def engine(self, blocks: int | None = None, **options: Any) -> Engine:
        executor = self.llm.executor(**self.options)
        return Engine(self.llm.model.graph, executor, max_len=256, blocks=blocks, options=Options(**options))

    def size(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.llm.engine.block_size)

    def params(self, n: int) -> SamplingParams:
        return SAMPLED if n % 2 else GREEDY


@pytest.fixture(
    scope="module", params=["reference", "native f32", "native f16", "native int8", "states reference", "states native"]
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    words = request.param.split()
    if words[0] == "states":
        folder: Path = oracle(next(row for row in ROWS if row.name == "jamba"))[0]
    else:
        folder = tiny.write(tmp_path_factory.mktemp("tiny"), CONFIG, tiny.tensors(CONFIG))
    name = words[1] if words[0] == "states" else words[0]
    options = {"threads": 1, **({"kv": words[1]} if words[0] == "native" else {})}
    with LLM(folder, engine=name, max_model_len=256) as llm:
        yield Subject(llm, options, make_prompts(llm.engine.block_size // 4))


@pytest.fixture(autouse=True)
def _logits(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of logits is compared with the first one after the same ids; the first run is of each prompt alone."""
    sample = engine_module.sample

    def checked(
        logits: np.ndarray, states: list[SamplerState], pool: native.Pool | None
    ) -> list[Sampled | InferflowError]:
        for row, state in zip(logits, states, strict=True):
            bits = row.tobytes()
            assert subject.logits.setdefault(tuple(state.ids), bits) == bits
        return sample(logits, states, pool)

    monkeypatch.setattr(engine_module, "sample", checked)
    if not subject.alone:
        for n, prompt in enumerate(subject.prompts):
            engine = subject.engine(prefix_cache=False)
            sequence = engine.add(prompt, subject.params(n))
            list(engine.run())
            subject.alone.append(sequence.ids)


def check(subject: Subject, engine: Engine, disturb: Callable[[int], None] = lambda step: None) -> None:
    """All prompts, which arrive while others run; each has its answer, and everything is free afterwards."""
    arriving = list(enumerate(subject.prompts))
    sequences: list[Sequence] = []
    step = 0
    while arriving or engine.running or engine.waiting:
        if step % 2 == 0 and arriving:
            n, prompt = arriving.pop(0)
            sequences.append(engine.add(prompt, subject.params(n), priority=-n))
        disturb(step)
        engine.step()
        step += 1
    assert [s.ids for s in sequences] == subject.alone
    assert len(engine.pool.free) == engine.pool.blocks


@pytest.mark.parametrize("budget", [1, 7, 64, 512])
def test_batched_and_chunked(subject: Subject, budget: int) -> None:
    check(subject, subject.engine(budget=budget))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "mlfq", "sequential", "static"])
@pytest.mark.parametrize("prefill_first", [False, True])
def test_policies(subject: Subject, policy: str, prefill_first: bool) -> None:
    check(subject, subject.engine(policy=policy, prefill_first=prefill_first, budget=40))


@pytest.mark.parametrize("swap", [0, 1 << 20])
@pytest.mark.parametrize("policy", ["priority", MultiLevelFeedbackQueue(quantum=4.0, patience=30)])
def test_preempted(subject: Subject, swap: int, policy: Any) -> None:
    """There is room for the longest sequence and little more."""
    engine = subject.engine(subject.size(len(subject.prompts[0]) + NEW) + 2, swap_bytes=swap, policy=policy, budget=48)
    check(subject, engine)
    assert engine.scheduler.totals.preempted
    assert bool(engine.scheduler.totals.swapped) == bool(swap)


@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_preempted_at_every_point(subject: Subject, swap: int) -> None:
    """Whoever runs, and however far it is, it is put aside every third step, for a while."""
    engine = subject.engine(swap_bytes=swap, budget=16)

    def disturb(step: int) -> None:
        if engine.running and step % 3 == 0 and step < 60:
            engine.scheduler.preempt(engine.running[step % len(engine.running)])

    check(subject, engine, disturb)
    assert engine.scheduler.totals.preempted > 8


def test_known_prefixes(subject: Subject) -> None:
    engine = subject.engine(budget=64)
    for _ in range(3):
        check(subject, engine)
    states = bool(engine.cache.states)
    assert bool(engine.scheduler.totals.cached) == (not states)
    warm = engine.add(subject.prompts[0], GREEDY)
    engine.step()
    whole = (len(subject.prompts[0]) - 1) // engine.block_size * engine.block_size
    assert warm.cached == (0 if states else whole)
    engine.abort(warm)
    salted = engine.add(subject.prompts[0], GREEDY, extras={"cache_salt": "mine"})
    list(engine.run())
    assert (salted.cached, salted.ids) == (0, subject.alone[0])


@pytest.mark.parametrize("prompt", [0, 2, 3])
@pytest.mark.parametrize("room", [2, 100])
def test_several_answers_to_one_prompt(subject: Subject, prompt: int, room: int) -> None:
    """Forks have the answers that separate requests have, with little room or much."""
    ids = subject.prompts[prompt]
    want = []
    for index in range(4):
        engine = subject.engine(prefix_cache=False)
        want.append(engine.add(ids, SAMPLED, index))
        list(engine.run())
    engine = subject.engine(subject.size(len(ids) + NEW) + room)
    first = engine.add(ids, SAMPLED)
    forks = [first, *(engine.fork(first, index) for index in range(1, 4))]
    list(engine.run())
    assert [s.ids for s in forks] == [s.ids for s in want]
    assert len({tuple(s.ids) for s in forks}) > 1
    assert len(engine.pool.free) == engine.pool.blocks


def test_forks_share_their_prompt(subject: Subject) -> None:
    """Four answers take the blocks of one prompt, and at most two of their own each."""
    engine = subject.engine(64)
    first = engine.add(subject.prompts[0], SAMPLED)
    for index in range(1, 4):
        engine.fork(first, index)
    while len(engine.running) < 4:
        engine.step()
    prompt = subject.size(len(subject.prompts[0]))
    used = engine.pool.blocks - len(engine.pool.free)
    assert used >= 4 * prompt if engine.cache.states else used <= prompt + 8


def test_a_beam_goes_on_elsewhere(subject: Subject) -> None:
    """A fork in the midst of an answer, with another last token."""
    engine = subject.engine(budget=64)
    trunk = engine.add(subject.prompts[4], GREEDY)
    while len(trunk.ids) < len(subject.prompts[4]) + 9:
        engine.step()
    branch = engine.fork(trunk, 1, [*trunk.ids[:-1], 3])
    list(engine.run())
    other = subject.engine(prefix_cache=False)
    want = other.add([*subject.prompts[4], *trunk.ids[len(subject.prompts[4]) :][:8], 3], GREEDY)
    list(other.run())
    shared = len(branch.ids)
    assert shared == len(subject.prompts[4]) + NEW
    assert branch.ids == want.ids[:shared]
    assert trunk.ids == subject.alone[4]


def test_others_are_aborted(subject: Subject) -> None:
    """Waiting, in the midst of their prompts, and while they decode."""
    engine = subject.engine(budget=32)
    others: list[Sequence] = []

    def disturb(step: int) -> None:
        if step % 2 == 0 and step < 60:
            others.append(engine.add(subject.prompts[step % len(subject.prompts)][: 5 + step], SAMPLED))
        if step % 3 == 0 and others:
            engine.abort(others.pop(step % len(others)))

    check(subject, engine, disturb)


def test_a_run_beside_the_loop(subject: Subject) -> None:
    """`forward` takes the blocks of others when there are too few, and their answers stay the same."""
    engine = subject.engine(subject.size(len(subject.prompts[0]) + NEW) + 2)
    want = engine.forward(subject.prompts[0])["logits"]

    def disturb(step: int) -> None:
        if step % 7 == 5:
            np.testing.assert_array_equal(engine.forward(subject.prompts[0], chunk=50)["logits"], want)

    check(subject, engine, disturb)
