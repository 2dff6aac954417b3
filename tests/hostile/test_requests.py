"""Requests that are wrong, interrupted, interleaved or shared among threads: each ends cleanly, and the next is served."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferflow import LLM, SamplingParams
from inferflow.errors import ArgumentError, ClosedError, InferflowError, UnsupportedError
from inferflow.kernels import native
from tests.tiny import tensors, write

ASKED: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def answer(shared: LLM) -> tuple[int, ...]:
    return shared.generate([PROMPT], **ASKED)[0].ids


@pytest.fixture
def llm(shared: LLM, answer: tuple[int, ...]) -> Iterator[LLM]:
    """The model; afterwards it is idle, all its blocks are free, and it answers as before."""
    yield shared
    engine = shared._engine
    assert not engine.running
    assert not engine.waiting
    assert sorted(engine.pool.free) == list(range(engine.pool.blocks))
    assert shared.generate([PROMPT], **ASKED)[0].ids == answer


WRONG: dict[str, Callable[[LLM], Any]] = {
    "no prompt": lambda m: m.generate(None),  # type: ignore[call-overload]
    "a number": lambda m: m.generate(5),  # type: ignore[call-overload]
    "ids without a list around": lambda m: m.generate([3, 4, 5]),  # type: ignore[list-item]
    "an array of ids": lambda m: m.generate(np.array([3, 4])),  # type: ignore[call-overload]
    "bytes": lambda m: m.generate(b"ab"),  # type: ignore[call-overload]
    "bytes in a list": lambda m: m.generate([b"\x03\x04"]),
    "a dict": lambda m: m.generate({"prompt": "x"}),  # type: ignore[call-overload]
    "None in a list": lambda m: m.generate([None]),  # type: ignore[list-item]
    "nothing": lambda m: m.generate([[]]),
    "negative": lambda m: m.generate([[-1]]),
    "vocabulary": lambda m: m.generate([[67]]),
    "2**63": lambda m: m.generate([[2**63]]),
    "a float": lambda m: m.generate([[1.5]]),  # type: ignore[list-item]
    "a word": lambda m: m.generate([["1"]]),  # type: ignore[list-item]
    "true": lambda m: m.generate([[True]]),
    "one good, one bad": lambda m: m.generate([[3], [-1]]),
    "one good, one long": lambda m: m.generate([[3], [3] * 200]),
    "as long as the context": lambda m: m.generate([[3] * 96]),
    "logits of nothing": lambda m: m.logits(None),  # type: ignore[arg-type]
    "a name for names": lambda m: m.forward([3], "logits"),
    "no names": lambda m: m.forward([3], None),  # type: ignore[arg-type]
    "a number for a name": lambda m: m.forward([3], [5]),  # type: ignore[list-item]
    "a list for a name": lambda m: m.forward([3], [["a"]]),  # type: ignore[list-item]
    "half a position": lambda m: m.logits([3], positions=slice(1.5, None)),
    "a word for a position": lambda m: m.logits([3], positions=slice("a", None)),
    "a word for a step": lambda m: m.logits([3], positions=slice(None, None, "a")),
    "threads in words": lambda m: m.executor(threads="zz"),  # type: ignore[arg-type]
    "a list of threads": lambda m: m.executor(threads=[]),  # type: ignore[arg-type]
    "no cache type": lambda m: m.executor(kv=None),  # type: ignore[arg-type]
    "a number for isa": lambda m: m.executor(isa=0),  # type: ignore[arg-type]
    "a dict of parameters": lambda m: m.generate([[3]], {"temperature": 1}),  # type: ignore[call-overload]
    "max_tokens of 10**30": lambda m: m.generate([[3]], max_tokens=10**30),
    "temperature of 5000 digits": lambda m: m.generate([[3]], temperature=10**5000),
    "a number for stop": lambda m: m.generate([[3]], stop=5),
    "bytes for stop": lambda m: m.generate([[3]], stop=b"x"),
    "a word for a flag": lambda m: m.generate([[3]], ignore_eos="no"),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments(llm: LLM, call: Callable[[LLM], Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(llm)
    assert caught.value.where
    assert caught.value.fix
    assert len(str(caught.value)) < 400


class Text(str):
    """A subclass, as libraries make them."""


def test_arguments_that_are_unusual_and_right(llm: LLM, answer: tuple[int, ...]) -> None:
    def ids(prompt: Any = PROMPT, **options: Any) -> tuple[int, ...]:
        return llm.generate([prompt], **{**ASKED, **options})[0].ids

    for options in ({"stop": None}, {"stop": {"x"}}, {"stop": Text("x")}, {"stop": [Text("x")]}, {"seed": 0}):
        assert ids(**options) == answer
    assert ids(np.array(PROMPT)) == ids(iter(PROMPT)) == ids(tuple(PROMPT)) == answer
    assert ids(max_tokens=np.int64(6), top_k=np.int32(1), temperature=np.float32(3)) == answer
    assert llm.generate([], **ASKED) == []
    assert llm.forward([3], []) == {}
    assert len(llm.generate([[3] * 95], ignore_eos=True)[0].ids) == 1
    assert llm.logits([3] * 96).shape == (96, 67)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-100, 1e-10, 1e-5])
def test_a_temperature_near_zero_is_greedy(llm: LLM, answer: tuple[int, ...], temperature: float) -> None:
    assert llm.generate([PROMPT], temperature=temperature, seed=1, **ASKED)[0].ids == answer
    assert llm.generate([PROMPT], temperature=1.0, top_p=5e-324, seed=1, **ASKED)[0].ids == answer


def test_two_streams_at_once(llm: LLM, answer: tuple[int, ...]) -> None:
    one, two = llm.stream(PROMPT, **ASKED), llm.stream(PROMPT, **ASKED)
    both = list(zip(one, two, strict=True))
    assert tuple(a.token for a, _ in both) == tuple(b.token for _, b in both) == answer
    assert [a.finish for a, _ in both] == [None] * 5 + ["length"]


def test_other_calls_in_the_middle_of_a_stream(llm: LLM, answer: tuple[int, ...]) -> None:
    stream = llm.stream(PROMPT, **ASKED)
    tokens = [next(stream).token]
    assert llm.generate([PROMPT, [9]], **ASKED)[0].ids == answer
    llm.logits([9, 9, 9])
    with pytest.raises(ArgumentError):
        llm.generate([[-1]])
    assert (*tokens, *(chunk.token for chunk in stream)) == answer


def test_abandoned_streams(llm: LLM) -> None:
    for _ in range(20):
        stream = llm.stream(PROMPT, max_tokens=60)
        next(stream)
        del stream
    llm.stream(PROMPT, max_tokens=60)  # never begun


def test_threads_share_a_model(llm: LLM, answer: tuple[int, ...]) -> None:
    got: list[tuple[int | None, ...]] = []

    def work(number: int) -> None:
        for _ in range(4):
            if number % 2:
                got.append(llm.generate([[7, 8], PROMPT], **ASKED)[1].ids)
            else:
                got.append(tuple(chunk.token for chunk in llm.stream(PROMPT, **ASKED)))
            llm.logits([3, 4])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [answer] * 24


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), InferflowError("no")], ids=lambda e: type(e).__name__
)
def test_a_step_that_fails_changes_nothing(
    llm: LLM, answer: tuple[int, ...], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    bystander = llm.stream(PROMPT, **ASKED)
    tokens = [next(bystander).token]
    run, calls = llm._engine.executor.run, []

    def failing(*args: Any) -> np.ndarray:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return run(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.executor, "run", failing)
        with pytest.raises(type(error)):
            llm.generate([[3], [4, 5, 6]], **ASKED)
    assert (*tokens, *(chunk.token for chunk in bystander)) == answer


def test_not_a_number_fails_its_own_request_only(tmp_path: Path) -> None:
    weights = tensors()
    weights["model.embed_tokens.weight"][66] = np.nan
    with LLM(write(tmp_path, weights=weights)) as llm:
        want = llm.generate([PROMPT], **ASKED)[0].ids
        good = llm.stream(PROMPT, **ASKED)
        tokens = [next(good).token]
        with pytest.raises(InferflowError, match="no finite logits"):
            llm.generate([[66]], max_tokens=2)
        assert (*tokens, *(chunk.token for chunk in good)) == want
        assert len(llm._engine.pool.free) == llm._engine.pool.blocks


def test_a_closed_model_says_so(folder: Path) -> None:
    llm = LLM(folder)
    stream = llm.stream(PROMPT, **ASKED)
    next(stream)
    llm.close()
    llm.close()
    calls: list[Callable[[], Any]] = [
        lambda: next(stream),
        lambda: llm.generate([[3]]),
        lambda: llm.logits([3]),
        lambda: llm.forward([3], ["logits"]),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="is closed"):
            call()


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 0}, {"max_model_len": "8"}, {"max_model_len": True}, {"max_model_len": 1.5},
        {"max_model_len": 1 << 25}, {"slots": 0}, {"slots": "x"}, {"options": {}}, {"config": 5}, {"config": [1]},
        {"engine": "gpu"}, {"engine": 5}, {"kv": None}, {"kv": 1}, {"kv": []}, {"kv": "nonsense"}, {"isa": 1}, {"isa": [5]},
        {"threads": 0}, {"threads": 5000}, {"threads": "2"}, {"threads": 10**5000},
    ],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_wrong_options_of_a_model(folder: Path, engine: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        LLM(folder, **{"engine": engine, **options})
    assert caught.value.where in options
    assert caught.value.fix
    assert "threads" not in options or caught.value.fix.endswith("from 1 to 1024")


@pytest.mark.skipif(not native.available(), reason="the instruction sets are the native library's")
def test_an_unknown_instruction_set_is_refused_by_every_engine(folder: Path) -> None:
    for engine in ("native", "reference"):
        with pytest.raises(ArgumentError, match="there is no instruction set 'zzz'"):
            LLM(folder, engine=engine, isa="zzz")
    with LLM(folder, engine="reference", isa=native.isa_name(), kv="int8", threads=2) as llm:
        assert llm.logits([3]).shape == (1, 67)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_a_fork_while_another_thread_runs_the_model(
    folder: Path, answer: tuple[int, ...], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread is in the midst of a step, and holds the lock for ever in the child."""
    with LLM(folder, engine=engine) as llm:
        begun, go_on, main = threading.Event(), threading.Event(), threading.current_thread()
        run = llm._engine.executor.run

        def stopping(*args: Any) -> np.ndarray:
            if threading.current_thread() is not main:
                begun.set()
                go_on.wait()
            return run(*args)

        monkeypatch.setattr(llm._engine.executor, "run", stopping)
        stream = llm.stream(PROMPT, **ASKED)
        tokens = [next(stream).token]
        worker = threading.Thread(target=llm.logits, args=([7] * 40,), daemon=True)
        worker.start()
        begun.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, which this is about
            child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(_in_the_child(llm, stream, answer))
        status = os.waitpid(child, 0)[1]
        go_on.set()
        worker.join()
        assert os.waitstatus_to_exitcode(status) == 0
        assert (*tokens, *(chunk.token for chunk in stream)) == answer  # the parent is as it was


def _in_the_child(llm: LLM, stream: Iterator[Any], answer: tuple[int, ...]) -> int:
    """0 if what ran is refused, all blocks are free, and the model answers."""
    try:
        next(stream)
        return 1
    except InferflowError as error:
        if "forked" not in error.reason:
            return 2
    if llm.generate([PROMPT], **ASKED)[0].ids != answer:
        return 3
    return 0 if len(llm._engine.pool.free) == llm._engine.pool.blocks else 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_stream_goes_on_in_a_child(llm: LLM, answer: tuple[int, ...]) -> None:
    stream = llm.stream(PROMPT, **ASKED)
    tokens = [next(stream).token]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads: the test runner has some
        child = os.fork()
    rest = tuple(chunk.token for chunk in stream)
    if child == 0:
        os._exit(0 if (*tokens, *rest) == answer else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (*tokens, *rest) == answer


@pytest.mark.parametrize("length", [-5, 0, None, 48.0])
def test_odd_lengths_in_a_config(folder: Path, length: Any) -> None:
    with LLM(folder, config={"max_position_embeddings": length}) as llm:
        assert llm.max_model_len == (48 if length == 48 else 8192)


def test_odd_end_tokens_in_a_config(folder: Path, answer: tuple[int, ...]) -> None:
    odd: list[dict[str, Any]] = [{"generation": "x"}, {"eos_token_id": "x"}, {"eos_token_id": [None, -1, 10**20]}]
    for config in odd:
        with LLM(folder, config=config) as llm:
            assert llm.generate([PROMPT], max_tokens=6)[0].ids == answer
    listed = {"eos_token_id": [1, answer[2]], "generation": {"eos_token_id": answer[3]}}
    with LLM(folder, config=listed) as llm:
        assert llm.generate([PROMPT], max_tokens=6)[0].finish == "stop"
        assert llm.generate([PROMPT], SamplingParams(**ASKED))[0].ids == answer


@pytest.mark.parametrize(("engine", "module"), [("native", "native"), ("reference", "kv_cache")])
def test_no_memory_for_the_cache_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str, module: str
) -> None:
    def full(*args: Any) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(f"inferflow.runtime.{module}.np.zeros", full)
    with pytest.raises(UnsupportedError, match="no memory") as caught:
        LLM(folder, engine=engine)
    assert caught.value.fix.startswith("lower max_model_len")


def test_a_stop_that_is_a_control_token(smollm2_path: Path) -> None:
    """Control tokens have no text to find a stop in: their ids count. Said by a user, they are text and nothing else."""
    with LLM(smollm2_path, max_model_len=256) as llm:
        ids = llm.chat_ids([{"role": "user", "content": "Name the capital of France."}])
        free = llm.generate([ids], max_tokens=12, ignore_eos=True)[0]
        cut = llm.generate([ids], max_tokens=12, ignore_eos=True, stop=["<|im_end|>", "zzz"])[0]
        assert (cut.text, cut.finish, cut.stop_string) == ("The capital of France is Paris.", "stop", "<|im_end|>")
        assert free.ids[: len(cut.ids)] == cut.ids
        assert len(free.ids) == 12
        chunks = list(llm.stream(ids, max_tokens=12, ignore_eos=True, stop="<|im_end|>"))
        assert "".join(chunk.text for chunk in chunks) == cut.text
        assert (chunks[-1].finish, chunks[-1].stop_string) == ("stop", "<|im_end|>")
