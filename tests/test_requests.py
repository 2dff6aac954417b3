"""What one request may ask for: several answers, log-probabilities, beams, structures, a time limit, a cache of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inferflow import LLM, Chunk, Options, SamplingParams
from inferflow.answers import Answers
from inferflow.errors import ArgumentError, DeadlineError, QueueFullError
from inferflow.runtime.engine import Engine, Event
from tests.tiny import CONFIG, write

PROMPT = [3, 14, 15, 9, 26]
LONG = [*range(3, 60), *range(3, 30)]  # more than a block


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"), {**CONFIG, "max_position_embeddings": 4096})


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    """All blocks are free again after each test."""
    with LLM(folder, options=Options(budget=16)) as made:
        yield made
        engine = made.engine
        assert len(engine.pool.free) == engine.pool.blocks
        assert not engine.running
        assert not engine.waiting


def logprobs(llm: LLM, ids: list[int]) -> np.ndarray:
    """Natural log-probabilities of every next token, float64 [positions, vocab]."""
    logits = llm.logits(ids).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_several_answers_are_those_of_each_by_itself(llm: LLM) -> None:
    asked = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    together = llm.generate([LONG], n=4, **asked)[0]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert len({choice.ids for choice in together.choices}) == 4
    assert (together.ids, together.finish) == (together.choices[0].ids, "length")
    for choice in together.choices:
        sequence = llm.engine.add(LONG, SamplingParams(**asked), choice.index)  # type: ignore[arg-type]
        assert tuple(event.token for event in llm.engine.run()) == choice.ids
        assert sequence.finish == "length"
    streamed: dict[int, list[int]] = {}
    for chunk in llm.stream(LONG, n=4, **asked):
        streamed.setdefault(chunk.index, []).append(chunk.token)
    assert [tuple(streamed[n]) for n in range(4)] == [choice.ids for choice in together.choices]


def test_answers_to_several_prompts_do_not_share_their_draws(llm: LLM) -> None:
    asked = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    both = llm.generate([PROMPT, PROMPT], n=2, **asked)
    assert len({choice.ids for completion in both for choice in completion.choices}) == 4


def test_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    told = llm.generate([LONG], max_tokens=6, logprobs=3, temperature=1.5, seed=1, ignore_eos=True)[0]
    want = logprobs(llm, [*LONG, *told.ids])[len(LONG) - 1 :]
    assert told.logprobs is not None
    assert [one.token for one in told.logprobs] == list(told.ids)
    for row, one in zip(want, told.logprobs, strict=False):
        assert one.logprob == pytest.approx(row[one.token], abs=1e-5)
        assert [token for token, _ in one.top] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [p for _, p in one.top] == pytest.approx(np.sort(row)[:-4:-1], abs=1e-5)
    assert llm.generate([LONG], max_tokens=2)[0].logprobs is None


def test_a_prompt_is_scored_however_it_is_cut(folder: Path, llm: LLM) -> None:
    llm.generate([LONG], max_tokens=1)  # its first block is known now
    want = logprobs(llm, LONG)
    found = []
    for budget in (1, 7, 512):
        with LLM(folder, options=Options(budget=budget)) as other:
            for n in (1, 2):
                found.append(other.generate([LONG], max_tokens=1, prompt_logprobs=2, n=n)[0].prompt_logprobs)
    found.append(llm.generate([LONG], max_tokens=1, prompt_logprobs=2)[0].prompt_logprobs)
    assert all(one == found[0] for one in found)
    assert found[0] is not None
    first, *scored = found[0]
    assert first is None
    for row, token, one in zip(want, LONG[1:], scored, strict=False):
        assert one is not None
        assert one.token == token
        assert one.logprob == pytest.approx(row[token], abs=1e-5)
        assert [best for best, _ in one.top] == np.argsort(-row, kind="stable")[:2].tolist()
    assert len(scored) == len(LONG) - 1
    assert llm.generate([PROMPT[:1]], max_tokens=1, prompt_logprobs=0)[0].prompt_logprobs == (None,)


def test_beams_find_what_is_likeliest(llm: LLM) -> None:
    """With as many beams as there are tokens, two tokens are searched through."""
    vocab = CONFIG["vocab_size"]
    first = logprobs(llm, PROMPT)[-1]
    every = {(end,): first[end] for end in llm.eos_ids}
    for token in range(vocab):
        if token not in llm.eos_ids:
            second = first[token] + logprobs(llm, [*PROMPT, token])[-1]
            every |= {(token, last): second[last] for last in range(vocab)}
    found = llm.beam_search(PROMPT, width=vocab, max_tokens=2, length_penalty=0.0)
    best = sorted(every, key=lambda ids: -every[ids])
    assert found.ids == best[0]
    assert [choice.score for choice in found.choices[:3]] == pytest.approx([every[ids] for ids in best[:3]], abs=1e-4)
    assert found.prompt_ids == tuple(PROMPT)


@pytest.mark.parametrize("length", [5, 90])  # with and without a full block before the beams part
def test_beams_share_and_give_back(llm: LLM, length: int) -> None:
    prompt = LONG[:length] + LONG[: max(0, length - len(LONG))]
    wide = llm.beam_search(prompt, width=3, max_tokens=40, length_penalty=1.0)
    assert len(wide.choices) == 3
    for choice in wide.choices:  # each score is that of its ids, computed at once
        rows = logprobs(llm, [*prompt, *choice.ids])[len(prompt) - 1 : -1]
        whole = sum(float(row[token]) for row, token in zip(rows, choice.ids, strict=True))
        assert choice.score == pytest.approx(whole / len(choice.ids), abs=1e-4)
    narrow = llm.beam_search(prompt, width=1, max_tokens=40)
    assert narrow.ids == llm.generate([prompt], max_tokens=40)[0].ids
    with pytest.raises(ArgumentError, match=r"^width"):
        llm.beam_search(prompt, width=0)


def test_salts_and_the_cache(llm: LLM) -> None:
    cold = llm.generate([LONG], max_tokens=2)[0]
    warm = llm.generate([LONG], max_tokens=2)[0]
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 64)
    assert warm == cold
    assert llm.generate([LONG], max_tokens=2, cache_salt="mine")[0].cached_tokens == 0
    assert llm.generate([LONG], max_tokens=2, cache_salt="mine")[0].cached_tokens == 64
    assert warm.timings.queued >= 0
    assert warm.timings.prefill > 0
    assert warm.timings.decode > 0


def test_a_time_limit(llm: LLM) -> None:
    with pytest.raises(DeadlineError, match="the time is up"):
        llm.generate([PROMPT], max_tokens=1000, ignore_eos=True, timeout=1e-9)
    assert len(llm.generate([PROMPT], max_tokens=3, ignore_eos=True, timeout=1000)[0].ids) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": float("nan")},
        {"timeout": "1"},
        {"priority": 1.5},
        {"priority": True},
        {"cache_salt": 5},
    ],
)
def test_wrong_terms_are_refused(llm: LLM, options: dict[str, object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        llm.generate([PROMPT], **options)
    assert caught.value.where == next(iter(options))


def test_what_does_not_fit_in_the_queue_leaves_nothing_there(folder: Path) -> None:
    with LLM(folder, options=Options(max_waiting=3)) as llm:
        with pytest.raises(QueueFullError, match="3 requests are waiting"):
            llm.generate([PROMPT], n=4)
        assert not llm.engine.waiting
        assert len(llm.generate([PROMPT], n=3)[0].choices) == 3


def test_who_comes_while_others_run_gets_its_turn(llm: LLM) -> None:
    ends = []
    begun = threading.Event()

    def long() -> None:
        for _ in llm.stream(PROMPT, max_tokens=3000, ignore_eos=True):
            begun.set()
        ends.append("long")

    thread = threading.Thread(target=long)
    thread.start()
    begun.wait()
    for _ in range(5):
        llm.generate([LONG], max_tokens=3)
    ends.append("short")
    thread.join()
    assert ends == ["short", "long"]


def test_an_answer_has_the_structure_asked_for(smollm2_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "people": {"type": "integer", "maximum": 99_999_999},
        },
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    with LLM(smollm2_path, max_model_len=256) as llm:
        asked = {"json_schema": schema, "max_tokens": 80, "temperature": 1.0, "seed": 2, "n": 3}
        together = llm.generate("A city, as JSON: ", **asked)
        for choice in together.choices:
            assert choice.finish == "stop"
            made = json.loads(choice.text)
            assert sorted(made) == ["city", "people"]
        assert llm.generate("One digit: ", regex="[0-9]", max_tokens=5).text in "0123456789"
        with pytest.raises(ArgumentError, match="regex"):
            llm.generate("x", regex="(")
        assert len(llm.engine.pool.free) == llm.engine.pool.blocks


def test_ids_that_the_tokenizer_lacks_never_come(llm: LLM) -> None:
    """Vocabularies are padded, and the rows of the padding were never trained."""
    first = int(llm.logits(PROMPT)[-1].argmax())
    engine = Engine(llm.model.graph, llm.executor(), max_len=128, vocab=first)
    for asked in (
        {},
        {"temperature": 100.0, "seed": 3},
        {"temperature": 100.0, "top_k": 40},
        {"repetition_penalty": 2.0},
    ):
        params = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=5, **asked)  # type: ignore[arg-type]
        engine.add(PROMPT, params)
        for event in engine.run():
            assert event.token is not None
            assert event.token < first
            assert all(token < first for token, _ in event.top)
    with pytest.raises(ArgumentError, match="logit_bias"):
        engine.add(PROMPT, SamplingParams(logit_bias={first: 1.0}))


def test_what_is_dropped_as_a_turn_ends_is_aborted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may drop a sequence between the last look of whoever has the engine and his letting go of it."""
    with llm.turn():
        sequence = llm.engine.add(PROMPT, SamplingParams())
    lock = threading.Lock()

    class Late:
        acquire = lock.acquire

        def release(self) -> None:
            if sequence.finish is None:
                llm.drop([sequence])
            lock.release()

    monkeypatch.setattr(llm, "_lock", Late())
    with llm.turn():
        pass
    assert sequence.finish == "abort"


def test_a_request_is_looked_at_when_it_has_news(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait: else a long list of prompts would slow each step."""
    counts = {"steps": 0, "events": 0}
    step, take = llm.step, Answers.take

    def counted_step() -> None:
        counts["steps"] += 1
        step()

    def counted_take(self: Answers, event: Event) -> Chunk:
        counts["events"] += 1
        return take(self, event)

    monkeypatch.setattr(llm, "step", counted_step)
    monkeypatch.setattr(Answers, "take", counted_take)
    answers = llm.generate([[3, n] for n in range(60)], max_tokens=5, ignore_eos=True)
    assert counts["events"] == sum(len(answer.ids) for answer in answers) == 300
    assert counts["steps"] > 10
