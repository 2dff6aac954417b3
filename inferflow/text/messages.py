"""Checking the messages of a chat, and taking plain copies of them: a template sees nothing but JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import TextError

__all__ = ["ROLES", "checked", "plain"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WHERE = "messages"
_MAX_DEPTH = 64


def checked(messages: Any, *, as_parts: bool) -> list[dict[str, Any]]:
    """Plain copies of `messages`; keys whose value is None are left out.

    Every message is a mapping with a `role` of `ROLES` and a `content` that is a string or a list of text parts
    (``{"type": "text", "text": …}``); an assistant that calls tools may have none. Lists of parts are joined to a string
    unless the template takes lists (`as_parts`). TextError otherwise, and for an empty list.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TextError("is not a list of messages", where=_WHERE, fix='pass [{"role": "user", "content": "…"}]')
    if not messages:
        raise TextError("is empty", where=_WHERE, fix="pass at least one message")
    return [_message(message, f"{_WHERE}[{at}]", as_parts) for at, message in enumerate(messages)]


def _message(message: Any, where: str, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TextError("is not a mapping", where=where, fix='pass {"role": "user", "content": "…"}')
    role = message.get("role")
    if role not in ROLES or not isinstance(role, str):
        raise TextError(f"unknown role {role!r}", where=where, fix=f"use one of {', '.join(ROLES)}")
    found: dict[str, Any] = {key: value for key, value in plain(message, where).items() if value is not None}
    if "content" not in found:
        if role == "assistant" and found.get("tool_calls"):
            return found
        raise TextError("has no content", where=where, fix="give it a string, an empty one if need be")
    found["content"] = _content(found["content"], where, as_parts)
    return found


def _content(content: Any, where: str, as_parts: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TextError(
            f"content is a {type(content).__name__}", where=where, fix="pass a string or a list of text parts"
        )
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            named = f"of type {kind!r}" if isinstance(kind, str) else "without a type"
            raise TextError(
                f"part {at} {named} is no text part", where=where, fix='pass {"type": "text", "text": "…"} parts only'
            )
    return content if as_parts else "".join(part["text"] for part in content)


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of `value` made of exact str, int, float, bool, None, list and dict; TextError for anything else."""
    if depth > _MAX_DEPTH:
        raise TextError(f"is nested more than {_MAX_DEPTH} deep", where=where, fix="flatten it")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind.__call__(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where, depth + 1) for item in value]
    raise TextError(
        f"holds a {type(value).__name__}", where=where, fix="pass strings, numbers, lists and mappings only"
    )
