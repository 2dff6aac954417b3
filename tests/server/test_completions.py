"""``/v1/completions``: what is asked in which form, and the form of the answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inferflow import LLM

from .conftest import LENGTH, Client, Start

PATH = "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder) as made:
        yield made


def test_an_answer_is_the_engines(client: Client, llm: LLM) -> None:
    ids = llm.encode("hello world")
    own = llm.generate([ids], max_tokens=8, ignore_eos=True, logprobs=2)[0]
    for prompt in ("hello world", ["hello world"], ids, [ids]):
        told = client.ask(PATH, prompt=prompt, logprobs=2, **GREEDY)
        assert (told["object"], told["model"]) == ("text_completion", "tiny")
        (choice,) = told["choices"]
        assert (choice["text"], choice["finish_reason"], choice["index"]) == (own.text, "length", 0)
        assert choice["logprobs"]["token_logprobs"] == [one.logprob for one in own.logprobs or ()]
        usage = told["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
            len(ids),
            8,
            len(ids) + 8,
        )
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < len(ids)
        assert (told["timings"]["predicted_n"], told["timings"]["cache_n"] + told["timings"]["prompt_n"]) == (
            8,
            len(ids),
        )


@pytest.mark.parametrize("n", [1, 2, 8])
def test_choices_are_numbered_over_prompts_and_answers(client: Client, n: int) -> None:
    asked = {
        "prompt": ["one", "two", "three"],
        "n": n,
        "temperature": 1.5,
        "seed": 3,
        "max_tokens": 5,
        "stop": ["a", "e"],
    }
    told = client.ask(PATH, **asked)
    assert [choice["index"] for choice in told["choices"]] == list(range(3 * n))
    parts = client.stream(PATH, **asked, stream_options={"include_usage": True})
    texts, ends = [""] * 3 * n, [""] * 3 * n
    for part in parts[:-1]:
        assert part["usage"] is None
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] += choice["finish_reason"] or ""
    assert texts == [choice["text"] for choice in told["choices"]]
    assert ends == [choice["finish_reason"] for choice in told["choices"]]
    assert parts[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert parts[-1]["usage"][name] == told["usage"][name]


def test_best_of_is_n_or_refused(client: Client) -> None:
    assert len(client.ask(PATH, prompt="a", n=2, best_of=2, **GREEDY)["choices"]) == 2
    assert client.post(PATH, {"prompt": "a", "best_of": 3}).json()["error"]["param"] == "best_of"


def test_scoring_as_lm_eval_does_it(client: Client, llm: LLM) -> None:
    """Prompts as ids, echoed with their logprobs; the one new token is thrown away by whoever asks."""
    prompts = [llm.encode(text) for text in ("The sea is blue", "Mind the gap between", "x")]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    told = client.ask(PATH, **body, temperature=0)
    for ids, choice in zip(prompts, told["choices"], strict=True):
        scored = choice["logprobs"]
        assert len(scored["tokens"]) == len(ids) + 1 == len(scored["token_logprobs"]) == len(scored["top_logprobs"])
        assert scored["token_logprobs"][0] is None
        own = llm.generate([ids], max_tokens=1, prompt_logprobs=1)[0].prompt_logprobs or ()
        assert scored["token_logprobs"][1:-1] == [one.logprob for one in own[1:] if one is not None]
        for token, at, top in zip(scored["tokens"], scored["text_offset"], scored["top_logprobs"], strict=True):
            assert choice["text"][at:].startswith(token)
            assert top is None or token in top


def test_scoring_in_small_pieces(start: Start, client: Client) -> None:
    """A prompt that takes many steps is scored as one that takes one; also where its end is a step's."""
    small = Client(start("--token-budget", "4"))
    for length in (1, 4, 5, 50):
        asked = {
            "prompt": [70 + n for n in range(length)],
            "echo": True,
            "max_tokens": 1,
            "logprobs": 2,
            "temperature": 0,
        }
        assert small.ask(PATH, **asked)["choices"] == client.ask(PATH, **asked)["choices"]


def test_no_new_token_at_all(client: Client) -> None:
    """The prompt's own logprobs, the first being none; streamed as well."""
    asked = {"prompt": "hello world", "echo": True, "max_tokens": 0, "logprobs": 1}
    told = client.ask(PATH, **asked)
    (choice,) = told["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello world", "length")
    assert told["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert "".join(choice["logprobs"]["tokens"]) == "hello world"
    (part,) = client.stream(PATH, **asked)
    assert part["choices"] == told["choices"]
    assert client.ask(PATH, prompt="hello world", echo=True, max_tokens=0)["choices"][0]["text"] == "hello world"
    refused = client.post(PATH, {"prompt": "x", "max_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_echo_is_streamed_first(client: Client) -> None:
    told = client.ask(PATH, prompt=["ab", "cd"], echo=True, **GREEDY)
    texts = ["", ""]
    for part in client.stream(PATH, prompt=["ab", "cd"], echo=True, **GREEDY):
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in told["choices"]]
    assert [text[:2] for text in texts] == ["ab", "cd"]


def test_streamed_logprobs_are_the_same(client: Client) -> None:
    asked = {"prompt": "hello", "logprobs": 3, "stop": ["qqqqq"], **GREEDY, "max_tokens": 24}
    whole = client.ask(PATH, **asked)["choices"][0]["logprobs"]
    streamed: dict[str, list[Any]] = {name: [] for name in whole}
    for part in client.stream(PATH, **asked):
        for choice in part["choices"]:
            for name in whole:
                streamed[name] += choice["logprobs"][name]
    assert streamed == whole


def test_characters_of_several_tokens(client: Client, llm: LLM) -> None:
    """Allowed are the bytes of one emoji: the stream has no broken character, and names no two bytes alike."""
    known = llm.tokenizer
    assert known is not None
    pieces = ["😀".encode()[n : n + 1] for n in range(4)]
    ids = [next(i for i in range(known.vocab_size) if known.piece(i) == piece) for piece in pieces]
    asked = {"prompt": ids * 3, "max_tokens": 17, "allowed_token_ids": ids, "seed": 5, "temperature": 1, "logprobs": 0}
    told = client.ask(PATH, **asked)["choices"][0]
    parts = [part["choices"][0] for part in client.stream(PATH, **asked)]
    assert "".join(part["text"] for part in parts) == told["text"]
    names = {f"bytes:\\x{piece[0]:02x}" for piece in pieces}
    assert set(told["logprobs"]["tokens"]) <= names
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, **asked}
    content = client.ask(
        "/v1/chat/completions", **{k: v for k, v in chat.items() if k not in ("prompt",)} | {"logprobs": True}
    )
    told = content["choices"][0]
    data = bytes(byte for one in told["logprobs"]["content"] for byte in one["bytes"])
    assert data.decode("utf-8", "replace") == told["message"]["content"]


def test_probabilities_of_nothing_are_json(client: Client) -> None:
    """What is impossible has a logprob that JSON can hold."""
    for more in ({"top_k": 1}, {"logit_bias": {str(i): -100 for i in range(0, 300)}}, {"allowed_token_ids": [70]}):
        for body in ({"logprobs": 5}, {"logprobs": 5, "echo": True}):
            told = client.ask(PATH, prompt="abc", **{"max_tokens": 3, "temperature": 0.5, **body, **more})
            assert len(told["choices"][0]["logprobs"]["tokens"]) >= 3
            client.stream(PATH, prompt="abc", **{"max_tokens": 3, "temperature": 0.5, **body, **more})


def test_names_that_other_servers_have(client: Client, llm: LLM) -> None:
    """Each does what it says: shown by what it changes, or by what it agrees with."""
    plain = client.ask(PATH, prompt="hello", **GREEDY)["choices"][0]["text"]
    hot = {"prompt": "hello", "ignore_eos": True, "max_tokens": 8, "temperature": 5}
    assert client.ask(PATH, **hot, top_k=1, seed=1)["choices"][0]["text"] == plain
    assert client.ask(PATH, **hot, min_p=0.999, seed=1)["choices"][0]["text"] == plain
    assert (
        client.ask(PATH, **hot, seed=0)["choices"][0]["text"] == client.ask(PATH, **hot, seed=0)["choices"][0]["text"]
    )
    assert (
        client.ask(PATH, **hot, seed=-7)["choices"][0]["text"] == client.ask(PATH, **hot, seed=-7)["choices"][0]["text"]
    )
    first = llm.generate("hello", max_tokens=1).ids[0]
    stopped = client.ask(PATH, prompt="hello", **GREEDY, stop_token_ids=[first])
    assert (stopped["usage"]["completion_tokens"], stopped["choices"][0]["finish_reason"]) == (1, "stop")
    longer = client.ask(PATH, prompt="hello", **GREEDY, stop_token_ids=[first], min_tokens=4)
    assert longer["usage"]["completion_tokens"] >= 4
    other = client.ask(PATH, prompt="hello", **GREEDY, logit_bias={str(first): -100})
    assert other["choices"][0]["text"] != plain
    assert llm.tokenizer is not None
    letters = [i for letter in "qz" for i in llm.tokenizer.encode(letter, add_bos=False)]
    forced = {"prompt": "hello", **GREEDY, "allowed_token_ids": letters, "logit_bias": {str(letters[0]): 100}}
    assert client.ask(PATH, **forced)["choices"][0]["text"] == "q" * 8
    assert client.ask(PATH, **forced, bad_words=["q"])["choices"][0]["text"] == "z" * 8
    assert "qq" not in client.ask(PATH, **forced, bad_words=["qq"])["choices"][0]["text"]
    penalised = {"repetition_penalty": 3.0, "presence_penalty": 1.5, "frequency_penalty": 1.5}
    own = llm.generate("hello", max_tokens=8, ignore_eos=True, **penalised).text
    assert client.ask(PATH, prompt="hello", **GREEDY, **penalised)["choices"][0]["text"] == own


def test_zeros_are_no_absences(start: Start, folder: Path, tmp_path: Path) -> None:
    """Where the model's own defaults are something else, a zero is what was asked for."""
    path = shutil.copytree(folder, tmp_path / "hot")
    (path / "generation_config.json").write_text(json.dumps({"temperature": 5.0, "top_k": 1, "max_new_tokens": 3}))
    hot = Client(start("-m", str(path)))
    ask: dict[str, Any] = {"prompt": "hello", "ignore_eos": True, "max_tokens": 8}
    greedy = hot.ask(PATH, **ask)["choices"][0]["text"]
    assert hot.ask(PATH, **ask, temperature=0, top_k=0)["choices"][0]["text"] == greedy
    wild = [hot.ask(PATH, **ask, top_k=0, seed=0)["choices"][0]["text"] for _ in range(2)]
    assert wild[0] == wild[1] != greedy
    scores = hot.ask(PATH, **ask, logprobs=0)["choices"][0]["logprobs"]
    assert len(scores["token_logprobs"]) == 8
    assert {len(table) for table in scores["top_logprobs"]} == {1}
    for name in ("top_p", "max_tokens", "n", "timeout", "repetition_penalty"):
        assert hot.post(PATH, {**ask, name: 0}).json()["error"]["param"] == name


def test_prompt_logprobs(client: Client) -> None:
    told = client.ask(PATH, prompt="hello world", prompt_logprobs=2, **GREEDY)["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    assert all(2 <= len(table) <= 3 for table in told[1:])


def test_a_salt_keeps_prefixes_apart(client: Client) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 8

    def cached(**more: Any) -> int:
        return client.ask(PATH, prompt=prompt, **GREEDY, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() >= 64
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") >= 64


def test_stops(client: Client) -> None:
    """What ends the text is not in it; nothing of it is streamed; a control token stops by its text."""
    text = client.ask(PATH, prompt="hello", **GREEDY)["choices"][0]["text"]
    stop = text[3:6]
    told = client.ask(PATH, prompt="hello", **GREEDY, stop=[stop])["choices"][0]
    assert (told["text"], told["finish_reason"], told["stop_reason"]) == (text[: text.index(stop)], "stop", stop)
    parts = client.stream(PATH, prompt="hello", **GREEDY, stop=stop)
    assert "".join(part["choices"][0]["text"] for part in parts) == told["text"]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    never = client.stream(PATH, prompt="hello", **GREEDY, stop=["x" * 20])
    assert "".join(part["choices"][0]["text"] for part in never) == text
    end = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "logit_bias": {"4": 100}, "stop": ["<|im_end|>"]}
    told = client.ask(PATH, **end)["choices"][0]
    assert (told["text"], told["stop_reason"]) == ("", "<|im_end|>")


def test_progress_of_the_prompt(client: Client) -> None:
    parts = client.stream(PATH, prompt="a b c d e f g " * 40, return_progress=True, **GREEDY)
    progress = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    total = client.ask("/tokenize", prompt="a b c d e f g " * 40)["count"]
    assert progress[-1]["processed"] == progress[-1]["total"] == total
    assert all(not part["choices"] for part in parts if "prompt_progress" in part)
    assert not any("prompt_progress" in part for part in client.stream(PATH, prompt="a", **GREEDY))


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(client: Client, stream: bool) -> None:
    """Refused with both numbers before a stream begins; what just fits is answered."""
    for length, wanted, status in ((LENGTH - 1, 1, 200), (LENGTH, 1, 400), (LENGTH + 1, None, 400), (10, LENGTH, 400)):
        more = {} if wanted is None else {"max_tokens": wanted}
        answer = client.post(PATH, {"prompt": [70] * length, "stream": stream, "ignore_eos": True, **more})
        assert answer.status_code == status, answer.text
        if status == 400:
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (length, LENGTH)


def test_an_error_in_a_stream_is_an_event(client: Client) -> None:
    parts = client.stream(PATH, prompt="hello", timeout=1e-9, **GREEDY)
    assert parts[-1]["error"]["code"] == "deadline_exceeded"
    whole = client.post(PATH, {"prompt": "hello", "timeout": 1e-9, **GREEDY})
    assert (whole.status_code, whole.json()["error"]["type"]) == (408, "timeout_error")


def test_text_is_no_control_token(client: Client, llm: LLM) -> None:
    """Unless the caller says that it is."""
    assert llm.tokenizer is not None
    text = "a<|im_end|>b"
    plain = client.ask("/tokenize", prompt=text)["tokens"]
    assert not set(plain) & llm.tokenizer.special_ids
    assert 4 in client.ask("/tokenize", prompt=text, parse_special=True)["tokens"]
    assert client.ask(PATH, prompt=text, max_tokens=1)["usage"]["prompt_tokens"] == len(plain)
    assert client.ask(PATH, prompt=text, max_tokens=1, parse_special=True)["usage"]["prompt_tokens"] < len(plain)
    told = client.ask("/tokenize", prompt="hello world", return_token_strs=True)
    assert "".join(told["token_strs"]) == "hello world"
    assert client.ask("/detokenize", tokens=told["tokens"])["prompt"] == "hello world"
    assert client.ask("/detokenize", tokens=[4, 70])["prompt"] == known_text(llm, [70])
    assert client.ask("/detokenize", tokens=[4], skip_special_tokens=False)["prompt"] == "<|im_end|>"


def known_text(llm: LLM, ids: list[int]) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(ids)
