"""What goes wrong in engines: broken characters, lost state of preempted requests, indices that overflow, work that grows."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferflow import LLM, Completion, Options
from inferflow.errors import ArgumentError
from inferflow.kernels import native
from inferflow.runtime.batch import Span, StepBatch
from inferflow.text import Detokenizer, load_tokenizer
from tests.text.small import byte_level, save
from tests.tiny import CONFIG, tensors, write

STEM = [40 + n % 800 for n in range(0, 2100, 7)]
SCHEMA = {"type": "object", "properties": {"n": {"type": "string", "maxLength": 9}}, "required": ["n"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of bytes, random weights."""
    tokenizer = byte_level()
    config = {**CONFIG, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 1024}
    path = write(tmp_path_factory.mktemp("faults") / "tiny", config, tensors(config))
    return save(tokenizer, path)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(folder, threads=1) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The model; afterwards it is idle, and all its blocks are free."""
    yield shared
    idle(shared)


def idle(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.running
    assert not engine.waiting
    assert not any(engine.pool.references)


@pytest.mark.parametrize("text", ["😀", "贝", "👩‍👩‍👧"])
def test_answers_that_end_inside_a_character(llm: LLM, text: str) -> None:
    """Bytes of a character come in any order and end anywhere: streamed text is the whole answer's, is that of all its bytes,
    and a piece has U+FFFD only where they have it."""
    assert llm.tokenizer is not None
    pieces = {llm.tokenizer.piece(i): i for i in range(llm.tokenizer.vocab_size)}
    allowed = [pieces[bytes([byte])] for byte in sorted(set(text.encode()))]
    for length in range(1, 10):
        asked: dict[str, Any] = {"allowed_token_ids": allowed, "max_tokens": length, "temperature": 2.0, "n": 4}
        whole = llm.generate("a", seed=length, **asked)
        streamed = [""] * 4
        for chunk in llm.stream("a", seed=length, **asked):
            streamed[chunk.index] += chunk.text
        for choice in whole.choices:
            data = b"".join(map(llm.tokenizer.piece, choice.ids))
            assert choice.text == streamed[choice.index] == data.decode("utf-8", "replace")


def test_a_character_cut_by_a_stop_or_left(llm: LLM) -> None:
    """A stop of one character, found among bytes; and a stream that is left inside one."""
    assert llm.tokenizer is not None
    ids = [token for text in "xé" for token in llm.tokenizer.encode(text, add_bos=False)]
    asked: dict[str, Any] = {"allowed_token_ids": ids, "temperature": 5.0, "seed": 1, "max_tokens": 60}
    told = llm.generate("a", stop="é", **asked)
    assert (told.finish, told.stop_string) == ("stop", "é")
    assert "é" not in told.text
    stream = llm.stream("a", stop="é", **asked)
    next(stream)
    del stream


def test_a_token_is_looked_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the stream is."""
    tokenizer = load_tokenizer(None, folder)
    assert tokenizer is not None
    ids = tokenizer.encode("It was a dark and stormy night 😀; " * 50)
    piece, looks = tokenizer.piece, 0

    def counting(token: int) -> bytes:
        nonlocal looks
        looks += 1
        return piece(token)

    monkeypatch.setattr(tokenizer, "piece", counting)
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert looks == len(ids)
    assert text == tokenizer.decode(ids, skip_special=False)


JOBS: list[tuple[list[int], dict[str, Any]]] = [
    (STEM[:100], {"max_tokens": 120, "ignore_eos": True}),
    (STEM[:130], {"max_tokens": 90, "ignore_eos": True, "temperature": 1.0, "seed": 0, "n": 3, "stop": ["e", "a"]}),
    (STEM[3:70], {"max_tokens": 120, "temperature": 1.5, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.5}),
    (STEM[:90], {"max_tokens": 100, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1, "dry_multiplier": 0.8}),
    (STEM[9:99], {"max_tokens": 100, "temperature": 1.0, "seed": 3, "n": 2, "json_schema": SCHEMA}),
    (STEM[:64], {"max_tokens": 100, "ignore_eos": True, "logit_bias": {n: 0.01 * n - 4 for n in range(300)}}),
    (STEM[:10], {"max_tokens": 150, "ignore_eos": True, "temperature": 1.0, "seed": 8, "mirostat": 2}),
]  # fmt: skip


@pytest.fixture(scope="module")
def want(shared: LLM) -> tuple[list[Completion], Completion]:
    """What each gets alone, and the beams."""
    return [shared.generate([prompt], **asked)[0] for prompt, asked in JOBS], shared.beam_search(STEM[:70], 6, 60)


@pytest.mark.parametrize(
    "options",
    [
        Options(budget=32),
        Options(budget=9, policy="mlfq", swap_bytes=1 << 20),
        Options(budget=64, swap_bytes=1 << 15, prefix_cache=False),
    ],
    ids=["computed again", "swapped", "some of both"],
)
def test_preempted_requests_lose_nothing(
    folder: Path, want: tuple[list[Completion], Completion], options: Options
) -> None:
    """Seeds, penalties, structures, log-probabilities, several answers, beams, stops: in a cache for one, from many threads,
    whoever is thrown out, every answer is that of each alone."""
    with LLM(folder, threads=1, slots=1, max_model_len=300, options=options) as llm:
        got: dict[int, Any] = {}
        scheduler = llm.engine.scheduler

        def throw_out(_: Any) -> None:
            if scheduler.totals.steps % 10 == 0 and scheduler.running:
                scheduler.preempt(scheduler.running[scheduler.totals.steps // 10 % len(scheduler.running)])

        llm.listeners.append(throw_out)

        def ask(number: int) -> None:
            prompt, asked = JOBS[number]
            got[number] = llm.generate([prompt], **asked)[0]

        def search() -> None:
            got[-1] = llm.beam_search(STEM[:70], 6, 60)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(JOBS))] + [
            threading.Thread(target=search)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert scheduler.totals.preempted > 10
        assert (scheduler.totals.swapped > 0) == (options.swap_bytes > 0)
        assert [got[n] for n in range(len(JOBS))] == want[0]
        assert got[-1].choices == want[1].choices
        idle(llm)


def test_a_beam_search_is_admitted_once(folder: Path, llm: LLM) -> None:
    """Its beams do not queue for a place again, though they wait for each other."""
    with LLM(folder, threads=1, slots=1, max_model_len=320, options=Options(max_waiting=1)) as small:
        assert small.beam_search(STEM[:127], 8, 30).choices == llm.beam_search(STEM[:127], 8, 30).choices
        idle(small)


def test_penalties_of_one_row_are_its_own(llm: LLM) -> None:
    """Also where a prompt has the vocabulary's last id, and lengths differ."""
    last = llm.model.graph.vocab - 1
    prompts = [[last], [last, 5, last, 9], STEM[:70]]
    plain = [llm.generate([prompt], max_tokens=20, ignore_eos=True)[0] for prompt in prompts]
    streams = [llm.stream(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts]
    hard = {"repetition_penalty": 1.2, "presence_penalty": 2.0, "frequency_penalty": -2.0}
    penalised = llm.stream([last, 7, last], max_tokens=20, ignore_eos=True, **hard)
    tokens: list[list[int]] = [[], [], []]
    for _ in range(20):
        next(penalised)
        for own, stream in zip(tokens, streams, strict=True):
            own.append(next(stream).token)
    assert [tuple(own) for own in tokens] == [one.ids for one in plain]
    del penalised, streams, stream


def test_a_model_let_go_in_the_midst_of_a_stream(folder: Path) -> None:
    llm = LLM(folder, threads=1)
    seen, stream = weakref.ref(llm), llm.stream("hello", max_tokens=20, ignore_eos=True)
    tokens = [next(stream).token]
    del llm
    tokens += [chunk.token for chunk in stream]
    assert len(tokens) == 20
    del stream
    gc.collect()
    assert seen() is None


@pytest.mark.skipif(not native.available(), reason="it is about the native cache's offsets")
def test_blocks_beyond_2_to_the_31(tmp_path: Path) -> None:
    """A cache is larger than 32 bits can count: of its last blocks the same comes as of its first. It is not touched elsewhere,
    so it takes address space and no memory."""
    with LLM(write(tmp_path, {**CONFIG, "num_hidden_layers": 1}), threads=1, kv="int8") as llm:
        executor = llm.executor(1, "int8")
        size = executor.block_size
        row = max(array[0].size for array in executor.cache(1).arrays)
        blocks = (1 << 31) // row + 2
        cache = executor.cache(blocks)
        assert max(array.size for array in cache.arrays) > 1 << 31
        ids = np.arange(3, 3 + size + 1) % 60
        out = []
        for table in ((0, 1), (blocks - 2, blocks - 1)):
            span = Span(0, len(ids), 0, table, len(ids))
            batch = StepBatch(ids, np.arange(len(ids)), (span,), np.asarray([len(ids) - 1]))
            out.append(executor.run(batch, cache).copy())
        assert np.array_equal(*out)


@pytest.mark.parametrize("value", [0, 1.5, None, True, "8"])
def test_wrong_lengths_of_a_beam_search(llm: LLM, value: Any) -> None:
    with pytest.raises(ArgumentError, match="max_tokens"):
        llm.beam_search("a", 2, value)


@pytest.mark.parametrize("value", [1e3, -1e5, float("nan"), "x", None, 10**400])
def test_wrong_penalties_of_a_beam_search(llm: LLM, value: Any) -> None:
    with pytest.raises(ArgumentError, match="length_penalty"):
        llm.beam_search("a", 2, 4, length_penalty=value)


def test_other_threads_run_while_a_long_text_is_encoded(llm: LLM) -> None:
    """Else whoever sends one stops the steps of everybody."""
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.0005):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        assert llm.tokenizer is not None
        before = ticks
        backend = llm.tokenizer._backend
        count = len(backend.encode("hello world " * 50_000, []))
        seen = ticks - before
    finally:
        done.set()
        thread.join()
    assert count > 100_000
    assert seen > 20
