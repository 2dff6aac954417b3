"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..spec.expression import show
from .answer import Delivery, answer
from .body import Fields
from .errors import bad, refusing
from .sampling import MAX_TOP, take_sampling
from .service import Service
from .shapes import TextChoices, Words

__all__ = ["completions", "take_admission"]

MAX_TOKENS = 16  # OpenAI's default
MAX_ANSWERS = 4096

Prompt = str | list[int]


async def completions(http: Request, service: Service) -> Response:
    """Text or token ids in, one answer or several to each prompt."""
    fields = await service.fields(http)
    prompts = take_prompts(fields)
    asked = take_sampling(fields, service.defaults)
    asked.values["logprobs"] = fields.whole("logprobs", 0, MAX_TOP)
    asked.values.setdefault("max_tokens", MAX_TOKENS)
    echo, by_id = fields.flag("echo"), fields.flag("return_tokens_as_token_ids")
    special, parse = fields.flag("add_special_tokens", True), fields.flag("parse_special")
    admission, delivery = take_admission(fields), Delivery.take(fields)
    fields.done()
    scored = asked.values.get("prompt_logprobs") is not None
    if asked.values["max_tokens"] == 0 and type(asked.values["max_tokens"]) is int and (echo or scored):
        asked.values["max_tokens"], delivery.score_only = 1, True
    if echo and asked.values["logprobs"] is not None and not scored:
        asked.values["prompt_logprobs"] = asked.values["logprobs"]
    told = asked.values.get("prompt_logprobs") is not None
    delivery.whole, delivery.names = told or delivery.score_only, asked.names

    most = service.llm.llm.engine.options.max_waiting or MAX_ANSWERS

    def prepare() -> tuple[Any, list[list[int]], list[str] | None]:
        params = asked.params(service.tokenizer)
        if len(prompts) * params.n > most:
            reason = f"{len(prompts)} prompts with {params.n} answers each are more than the {most} that may wait"
            raise bad("prompt", reason, "send fewer at a time")
        ids = [encode(service, prompt, special, parse) for prompt in prompts]
        texts = [written(service, prompt) for prompt in prompts] if echo else None
        return params, ids, texts

    with refusing(asked.names):
        params, ids, texts = await service.off_loop(prepare)
    for one in ids:
        service.check_room(one, params.max_tokens, "prompt")
    words = Words(service.tokenizer, by_id)
    shape = TextChoices(words, params.logprobs is not None, params.n, texts, scored=scored)
    return await answer(http, service, ids, params, admission, shape, delivery)


def take_prompts(fields: Fields) -> list[Prompt]:
    """A text, several, the ids of one, or those of several."""
    given = fields.take("prompt")
    fix = "pass text, a list of texts, a list of token ids, or a list of those"
    if given is None:
        raise bad("prompt", "it is missing", fix)
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise bad("prompt", f"it is {show(given)}", fix)
    if all(type(item) is int for item in given):
        return [given]
    for item in given:
        good = isinstance(item, str) or (isinstance(item, list) and all(type(token) is int for token in item))
        if not good or type(item) is not type(given[0]):
            raise bad("prompt", f"{show(item)} is none", fix)
    return given


def take_admission(fields: Fields) -> dict[str, Any]:
    names = {name: fields.take(name) for name in ("priority", "timeout", "cache_salt")}
    return {name: value for name, value in names.items() if value is not None}


def encode(service: Service, prompt: Prompt, special: bool, parse: bool) -> list[int]:
    """What the caller wrote becomes no control token unless `parse` says so."""
    if not isinstance(prompt, str):
        return prompt
    return service.need_tokenizer().encode(prompt, add_bos=None if special else False, parse_special=parse)


def written(service: Service, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if service.tokenizer is None else service.tokenizer.decode(prompt)
