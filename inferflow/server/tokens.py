"""``POST /tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .chat import NAMES, encode_messages, take_messages
from .completions import encode
from .errors import bad, refusing
from .service import Service
from .shapes import Words

__all__ = ["detokenize", "tokenize"]


async def tokenize(http: Request, service: Service) -> Response:
    """The ids of a text, or of a conversation as the template writes it."""
    fields = await service.fields(http)
    service.need_tokenizer()
    text, strings = fields.text("prompt"), fields.flag("return_token_strs")
    special, parse = fields.flag("add_special_tokens", True), fields.flag("parse_special")
    if (text is None) == ("messages" not in fields.left):
        raise bad("prompt", "there is none, or messages beside it", "pass one of the two")
    messages = take_messages(fields) if text is None else None
    fields.done()

    def work() -> list[int]:
        return encode(service, text or "", special, parse) if messages is None else encode_messages(service, messages)

    with refusing(NAMES if messages else {}):
        ids = await service.off_loop(work)
    words = Words(service.tokenizer)
    made: dict[str, Any] = {"count": len(ids), "max_model_len": service.llm.llm.max_model_len, "tokens": ids}
    return JSONResponse({**made, "token_strs": [words.name(token) for token in ids] if strings else None})


async def detokenize(http: Request, service: Service) -> Response:
    """The text of ids. Control tokens have none, unless `skip_special_tokens` is false."""
    fields = await service.fields(http)
    tokenizer = service.need_tokenizer()
    ids, skip = fields.list("tokens"), fields.flag("skip_special_tokens", True)
    fields.done()
    if ids is None or not all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in ids):
        raise bad("tokens", "it is no list of token ids", f"ids go to {tokenizer.vocab_size - 1}")
    return JSONResponse({"prompt": await service.off_loop(tokenizer.decode, ids, skip)})
