"""Fields that hold anything at all: an answer, or a refusal in OpenAI's form, and nothing worse."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from inferflow.server.body import HARMLESS, UNSERVED
from inferflow.server.sampling import SAME

from .conftest import Client

OTHERS = [
    "seed", "logit_bias", "bad_words", "best_of", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt",
    "guided_json_object", "structured_outputs", "response_format", "messages", "logprobs", "top_logprobs", "echo", "stream",
    "stream_options", "return_progress", "priority", "timeout", "cache_salt", "tools", "tool_choice", "chat_template_kwargs",
    "reasoning_effort", "add_special_tokens", "parse_special", "return_tokens_as_token_ids", "max_completion_tokens", "model",
    "add_generation_prompt", "tokens", "return_token_strs", "skip_special_tokens", "json_schema", "regex", "grammar",
]  # fmt: skip
FIELDS = [*SAME, *sorted(UNSERVED), *sorted(HARMLESS), *OTHERS]
NUMBERS = [0, 1, -1, 2, 5, 0.5, -0.5, 0.0, 1.0, 1e300, 10**6, 2**63, 2**64, 2**200]
WORDS = ["", "a", "json", "object", "<|im_end|>", "x" * 300, "\0", "😀", "(a|b)*"]
KEYS = ["type", "json", "regex", "schema", "json_schema", "1", "role", "content", "include_usage", "text", "choice"]
SOUND: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [70]},
}


def anything(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return chance.choice(NUMBERS)
    if kind < 5:
        return chance.choice([*WORDS, True, False, None])
    values = [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    return values if kind < 7 else {chance.choice(KEYS): value for value in values}


@pytest.mark.parametrize("path", SOUND)
def test_any_fields(client: Client, path: str) -> None:
    chance = random.Random(path)
    seen = set()
    for field in FIELDS * 2:
        body = {**SOUND[path], field: anything(chance)}
        answer = client.post(path, body)
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 404, 408), (body, answer.text)
        if answer.status_code != 200:
            error = json.loads(answer.text)["error"]
            assert set(error) >= {"message", "type", "param", "code"}
            assert error["message"], body
    assert {200, 400} <= seen
