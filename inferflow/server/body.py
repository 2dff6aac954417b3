"""A request's body: JSON read with bounds, and its fields taken one by one. What is left over is not passed over in silence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ..errors import did_you_mean
from ..runtime.sampling_params import whole
from ..spec.expression import show
from .errors import ApiError, ClientGoneError, bad

__all__ = ["Fields", "read_body", "read_json"]

MAX_UNKNOWN = 100  # fields, each of which is compared with all that are known

# Fields that change nothing here, and that clients send all the same.
HARMLESS = frozenset([
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "verbosity", "request_id", "guided_decoding_backend", "spaces_between_special_tokens",
    "include_reasoning",
])  # fmt: skip
# Fields whose meaning is known and not served, with the values that ask for nothing.
UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",), "audio": (), "modalities": (["text"],), "prediction": (), "web_search_options": (), "functions": ([],),
    "function_call": ("none", "auto"), "use_beam_search": (False,), "length_penalty": (1, 1.0), "early_stopping": (False,),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "truncate_prompt_tokens": (),
    "continue_final_message": (False,), "documents": (), "chat_template": (), "prompt_embeds": (), "logits_processors": ([],),
    "guided_whitespace_pattern": (), "mm_processor_kwargs": (), "xtc_probability": (0, 0.0), "top_a": (0, 0.0), "lora": (),
    "echo": (False,),
}  # fmt: skip


async def read_body(request: Request, limit: int) -> bytes:
    """The body; 413 for more than `limit` bytes, read or declared. Raises ClientGoneError."""
    declared = request.headers.get("content-length", "0")
    size, parts = 0, []
    try:
        if not declared.isdigit() or len(declared) > 18 or int(declared) > limit:
            raise _too_large(limit)
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes", None, "body_too_large", {"max_body": limit})


def read_json(data: bytes) -> dict[str, Any]:
    """One JSON object of finite numbers and whole characters; 400 for anything else."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_constant, parse_float=_finite)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise bad(None, "the body is not UTF-8", code="invalid_json") from None
    except UnicodeEncodeError:
        raise bad(None, "a string holds half of a surrogate pair", code="invalid_json") from None
    except RecursionError:
        raise bad(None, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise bad(None, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad(None, "the body is no JSON object", code="invalid_json")
    return value


def _constant(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word[:40]} is out of range")
    return value


class Fields:
    """The fields of one JSON object; a null one is absent. `at` is the object's own name, where it is inside another."""

    def __init__(self, table: Mapping[str, Any], at: str = "") -> None:
        self.left = {name: value for name, value in table.items() if value is not None}
        self.at = f"{at}." if at else ""
        self.known: set[str] = set()
        self.ignored: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        """The field as it stands: who takes it checks it."""
        self.known.add(name)
        return self.left.pop(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._of(bool, "true or false", name, default))

    def text(self, name: str) -> str | None:
        found: str | None = self._of(str, "a string", name, None)
        return found

    def table(self, name: str) -> Fields | None:
        found = self._of(dict, "an object", name, None)
        return None if found is None else Fields(found, self.at + name)

    def list(self, name: str) -> list[Any] | None:
        found: list[Any] | None = self._of(list, "a list", name, None)
        return found

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is not None and not whole(value, low, high):
            raise bad(self.at + name, f"it is {show(value)}", f"it must be a whole number from {low} to {high}")
        return value

    def _of(self, kind: type, words: str, name: str, default: Any) -> Any:
        value = self.take(name, default)
        if value is not None and type(value) is not kind:
            raise bad(self.at + name, f"it is {show(value)}", f"it must be {words}")
        return value

    def done(self) -> None:
        """Refuses what nobody took: what is known and not served, by its name; what looks like a known name misspelt, with that
        name; inside another object, all. Other names at the top are `ignored`: clients send fields that came after us."""
        if len(self.left) > MAX_UNKNOWN:
            reason = f"{self.at or 'the request'} has {len(self.left)} fields that are not served"
            raise bad(self.at.rstrip(".") or None, reason, f"it can have {MAX_UNKNOWN} at most", "unknown_field")
        for name, value in self.left.items():
            if not self.at and name in HARMLESS:
                continue
            if not self.at and name in UNSERVED:
                if any(type(value) is type(nothing) and value == nothing for nothing in UNSERVED[name]):
                    continue
                raise bad(name, "it is not served here", "leave it out", "unsupported")
            close = did_you_mean(name[:100], self.known | (UNSERVED.keys() if not self.at else set()))
            if close or self.at:
                raise bad(f"{self.at}{name[:100]}", "there is no such field", close or "leave it out", "unknown_field")
            self.ignored.append(name[:100])
