"""``POST /v1/chat/completions``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..spec.expression import show
from ..text import encode_chat
from .answer import Delivery, answer
from .body import Fields
from .completions import take_admission
from .errors import bad, refusing
from .sampling import MAX_TOP, Asked, take_sampling
from .service import Service
from .shapes import Chats, Words

__all__ = ["NAMES", "chat", "encode_messages", "take_messages"]

NAMES = {"prompt": "messages", "chat template": "messages"}
RESERVED = frozenset(["tokenizer", "messages", "template", "add_generation_prompt", "tools"])


async def chat(http: Request, service: Service) -> Response:
    """A conversation in, by the model's own template; what people wrote in it is no control token."""
    fields = await service.fields(http)
    messages = take_messages(fields)
    asked = take_sampling(fields, service.defaults)
    take_logprobs(fields, asked)
    limit = fields.take("max_completion_tokens")
    if limit is not None:
        asked.values["max_tokens"], asked.names["max_tokens"] = limit, "max_completion_tokens"
    by_id = fields.flag("return_tokens_as_token_ids")
    admission, delivery = take_admission(fields), Delivery.take(fields)
    fields.done()
    delivery.names = asked.names | NAMES

    def prepare() -> tuple[Any, list[int]]:
        return asked.params(service.tokenizer), encode_messages(service, messages)

    with refusing(delivery.names):
        params, ids = await service.off_loop(prepare)
    service.check_room(ids, params.max_tokens, "messages")
    if params.max_tokens is None:  # all that fits
        params = replace(params, max_tokens=service.room(len(ids)))
    delivery.whole = params.prompt_logprobs is not None
    shape = Chats(Words(service.tokenizer, by_id), params.logprobs is not None)
    return await answer(http, service, [ids], params, admission, shape, delivery)


def take_messages(fields: Fields) -> dict[str, Any]:
    """The arguments of `encode_chat`."""
    messages = fields.list("messages")
    if messages is None:
        raise bad("messages", "it is missing", 'pass [{"role": "user", "content": "…"}]')
    tools, choice = fields.list("tools"), fields.take("tool_choice")
    if choice not in (None, "none", "auto"):
        raise bad("tool_choice", f"it is {show(choice)}", "calls are not forced here: use none or auto", "unsupported")
    extra = fields.table("chat_template_kwargs")
    variables = {} if extra is None else dict(extra.left)
    for name in RESERVED & variables.keys():
        raise bad("chat_template_kwargs", f"{name} is no variable of one's own", "leave it out")
    effort = fields.text("reasoning_effort")
    if effort is not None:
        variables["reasoning_effort"] = effort
    prompt = fields.flag("add_generation_prompt", True)
    return {**variables, "messages": messages, "tools": tools or None, "add_generation_prompt": prompt}


def encode_messages(service: Service, arguments: dict[str, Any]) -> list[int]:
    return encode_chat(service.need_tokenizer(), template=service.need_template(), **arguments)


def take_logprobs(fields: Fields, asked: Asked) -> None:
    """`logprobs` says whether, `top_logprobs` how many beside the token that came."""
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MAX_TOP)
    if top is not None and not wanted:
        raise bad("top_logprobs", "logprobs is not true", "set it, or leave this out")
    asked.values["logprobs"] = (top or 0) if wanted else None
    asked.names["logprobs"] = "top_logprobs"
