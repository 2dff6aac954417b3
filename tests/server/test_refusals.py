"""Requests that are wrong: each is a 400 that names the field, and the next request is served as ever."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from .conftest import SLOW, Client, Server, Start

PATH = "/v1/completions"
BIG = 2**63

WRONG: dict[str, list[Any]] = {
    "prompt": [
        [], [[]], [-1], [10**6], [BIG], [1.5], ["1", 1], [True], [[1], "a"], {"a": 1}, 5, False, [None], [[1], [2.0]], [["a"]],
    ],
    "temperature": [-1, "hot", True, [], {}, 1e4, 10**400],
    "top_p": [0, -1, 1.5, "x"],
    "top_k": [-2, 1.5, "x"],
    "min_p": [-0.1, 1],
    "n": [0, -1, 129, 1.0, "2", True],
    "max_tokens": [0, -1, 1.5, "9", True, BIG],
    "min_tokens": [-1, 17],
    "stop": ["", [""], [1], {"a": 1}, ["a"] * 65, 5],
    "stop_token_ids": [[-1], ["a"], 5, [10**6]],
    "logit_bias": [
        {"-1": 1}, {"abc": 1}, {"1": 1000}, {"1": "x"}, {"9999999": 1}, [1], {"1" * 30: 1}, {"\u0663": 1}, {"904": 1e30},
    ],
    "allowed_token_ids": [[], [-1], [10**6], "x"],
    "bad_words": ["x", [""], [1], [" "]],
    "logprobs": [-1, True, 1.5, "5", 10**6],
    "repetition_penalty": [0, -1, "x"],
    "presence_penalty": [3, "x"],
    "seed": [1.5, "x", 2**64, True, -(2**63) - 1],
    "stream": [1, "true", []],
    "stream_options": [{"include_usage": 1}, 5, {"include_use": True}, {"continuous_usage_stats": True}],
    "echo": [1, "yes"],
    "priority": ["x", 1.5],
    "timeout": [0, -1, "x"],
    "cache_salt": [5, []],
    "guided_regex": ["(", "(?<=x)*", 5, "", "(" * 20_000],
    "guided_grammar": ["start: (", "nothing", 5],
    "guided_choice": [[], [1], "x", [""]],
    "guided_json": [
        5, "{", {"type": "nonsense"}, {"$ref": "#/nowhere"}, {"properties": {"foo": "bar"}}, {"enum": []},
    ],
    "structured_outputs": [{"regexp": "a"}, "x", {"regex": "("}], "json_schema": [5, "{"], "regex": ["(", 5],
    "response_format": ["json", {"type": "xml"}, {"type": "json_schema"}, {"type": "text", "x": 1}],
    "suffix": ["end"], "best_of": [3], "use_beam_search": [True], "truncate_prompt_tokens": [5], "audio": [{}],
    "skip_special_tokens": [False], "include_stop_str_in_output": [True], "model": [5],
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_field(client: Client, field: str) -> None:
    """Streamed or not: the stream has not begun."""
    for value in WRONG[field]:
        for stream in (False, True):
            answer = client.post(PATH, {"prompt": "hello", "max_tokens": 4, "stream": stream, field: value})
            assert answer.status_code == 400, (value, answer.text)
            error = answer.json()["error"]
            assert error["param"].split(".")[0] == field, (value, error)
            assert error["type"] == "invalid_request_error"
            assert error["message"]


def test_a_misspelt_field_is_told_its_name(client: Client) -> None:
    error = client.post(PATH, {"prompt": "x", "temprature": 0}).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_field", "temprature")
    assert "did you mean 'temperature'?" in error["message"]


def test_a_field_like_none_of_ours_is_let_through(client: Client) -> None:
    answer = client.post(PATH, {"prompt": "x", "max_tokens": 1, "zzqx": {"a": 1}})
    assert answer.status_code == 200, answer.text


def test_what_changes_nothing_is_let_through(client: Client) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    neutral = {
        "suffix": "",
        "use_beam_search": False,
        "length_penalty": 1.0,
        "skip_special_tokens": True,
        "audio": None,
    }
    client.ask(PATH, prompt="x", max_tokens=1, **harmless, **neutral, seed=None, stop=None, n=None)


@pytest.mark.parametrize("value", [5, "x", [], ["a"], {"a": 1}, True])
def test_nothing_but_an_object_is_a_request(client: Client, value: Any) -> None:
    for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert client.post(path, value).status_code == 400


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "text after it": b'{"prompt": "x"} x',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "too great a number": b'{"prompt": "x", "temperature": 1e999}',
    "too long a number": b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\\ud83d"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_json(client: Client, name: str) -> None:
    for path in (PATH, "/v1/chat/completions", "/tokenize"):
        answer = client.post(path, content=BODIES[name])
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "invalid_json"


def test_whole_characters_may_be_escaped(client: Client) -> None:
    told = client.post("/tokenize", content=b'{"prompt": "\\ud83d\\ude00"}')
    assert told.json()["tokens"] == client.ask("/tokenize", prompt="😀")["tokens"]


def test_deep_structures(client: Client) -> None:
    schema: Any = {"type": "string"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    body = {"prompt": "x", "max_tokens": 2, "guided_json": schema}
    assert client.post(PATH, body).status_code in (200, 400)
    cycle = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    assert client.post(PATH, {"prompt": "x", "max_tokens": 2, "guided_json": cycle}).status_code == 400
    assert client.post(PATH, {"prompt": "x", "max_tokens": 2, "guided_json": {"maximum": 2e10}}).status_code == 200
    tools = [{"x": schema}]
    for _ in range(100):
        tools = [tools]  # type: ignore[list-item]
    refused = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": tools})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("text", ["", " ", "\n", "\x00"])
def test_an_empty_prompt(client: Client, text: str) -> None:
    """Of a vocabulary without BOS has no token at all: refused; whitespace is text."""
    status = 400 if text == "" else 200
    for prompt in (text, [text]):
        assert client.post(PATH, {"prompt": prompt, "max_tokens": 1}).status_code == status
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    assert client.post("/v1/chat/completions", chat).status_code == 200


def test_routes(client: Client) -> None:
    for method, path, status in (
        ("GET", PATH, 405), ("POST", "/health", 405), ("GET", "/nope", 404), ("POST", "/v1", 404),
        ("DELETE", "/v1/models", 405), ("POST", "/v1/completions/", 404), ("GET", "//v1/models", 404),
        ("HEAD", "/health", 200), ("GET", "/", 200),
    ):  # fmt: skip
        answer = client.server.http.request(method, client.server.url + path)
        assert answer.status_code == status, (method, path)
        if status > 200:
            assert answer.json()["error"]["message"]
            assert (answer.headers.get("allow") is not None) == (status == 405)


def test_a_body_that_is_too_large(start: Start) -> None:
    """Declared or not, it is not read to its end."""
    server = start("--max-body", "1000")
    client = Client(server)
    told = client.post(PATH, {"prompt": "x" * 1000})
    assert (told.status_code, told.json()["error"]["max_body"]) == (413, 1000)
    chunks = (b"x" * 100 for _ in range(20))
    assert client.post(PATH, content=chunks).status_code == 413
    assert client.ask(PATH, prompt="x", max_tokens=1)
    raw = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    raw.request("POST", PATH, body=b"{}", headers={"Content-Length": "99999999999999999999"})
    assert raw.getresponse().status in (400, 413)
    raw.close()


def test_a_full_queue(start: Start, server: Server) -> None:
    """More than may wait is refused at once, with a time to come back: all of a request's prompts, or none. More than could
    ever wait is a mistake."""
    small = start("--max-waiting", "2", "--policy", "sequential", prelude=SLOW)
    client = Client(small)
    body = {"prompt": ["a"] * 2, "max_tokens": 60, "ignore_eos": True}
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(httpx.post(small.url + PATH, json=body, timeout=60).status_code))
               for _ in range(2)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200, 429]
    with small.http.stream("POST", small.url + PATH, json={**body, "stream": True, "max_tokens": 900}) as first:
        parts = first.iter_text()  # who drops it closes the connection
        next(parts)
        full = client.post(PATH, body)
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["code"] == "queue_full"
    small.until(small.idle)
    assert client.ask(PATH, prompt="a", max_tokens=1)
    never = client.post(PATH, {"prompt": ["a"] * 3})
    assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")


def test_a_fault_of_ours(start: Start) -> None:
    """Is a 500 that tells no secrets, is in the log, and harms nobody else."""
    broken = start(prelude="from inferflow.server import tokens\ntokens.encode = lambda *a: 1 / 0")
    client = Client(broken)
    told = client.post("/tokenize", {"prompt": "x"})
    assert (told.status_code, told.json()["error"]["type"]) == (500, "server_error")
    assert "division" not in told.text
    broken.wait_for("ZeroDivisionError")
    assert client.ask(PATH, prompt="a", max_tokens=1)


def test_errors_are_on_one_line(client: Client) -> None:
    told = client.post(PATH, {"prompt": "x", "temprature\n\x1b": 1, "a\nb\x1b": 1})
    assert told.status_code == 400
    assert "\n" not in json.loads(told.text)["error"]["message"]
    assert client.post(PATH, {"prompt": "x", "max_tokens": 1, "a\nb\x1b": 1}).status_code == 200
    client.server.http.get(f"{client.server.url}/a%0ab%1b[31m")
    assert not any("\x1b" in line for line in client.server.said)
