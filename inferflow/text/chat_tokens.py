"""Tokens of a chat: control tokens of the template are recognised, those that people write are text.

How the two are told apart: the messages are rendered twice, as they are and with marks (a private-use character that
occurs nowhere else) between all characters of what the caller gave, inside its blanks, so that a template that trims finds
the same. Marks out, the second rendering must be the first; then a control token with a mark in it is a person's text.

A template may look at the text (``startswith``, ``in``, ``split``). Where marks make it say something else, fewer are
tried: in contents only; then only at the edges of texts and inside the texts of control tokens; then only inside these;
then only after these. Where even that changes the rendering, nothing can be promised, and the chat is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import TextError
from .chat import ChatTemplate
from .literals import Words
from .tokenizer import Tokenizer

__all__ = ["encode_chat"]

_COMPARED = frozenset(["role", "type", "name", "id", "tool_call_id"])
_CONTENTS = frozenset(["content", "text", "reasoning_content", "reasoning", "thinking"])
_EDGES = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)

Span = tuple[int, int]
Change = Callable[[str], str]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate | None = None,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> list[int]:
    """Token ids of a chat, BOS as the model declares and never twice. `template` is the model's own where None.

    Nothing in `messages`, `tools` or `extra` becomes a control token. TextError as `ChatTemplate.render` raises it, and
    where a template rewrites text that holds a control token (see the module).
    """
    template = template if template is not None else ChatTemplate.of(tokenizer)
    variables = template.variables(messages, add_generation_prompt, tools, extra)
    text = template.render_plain(variables)
    trusted = _trusted(template, variables, text, tokenizer.control_words)
    return tokenizer.encode_spans(text, trusted, suffix=False)


def _trusted(template: ChatTemplate, variables: dict[str, Any], text: str, control: Words) -> list[Span]:
    """The parts of `text` between marks; a control token is recognised only inside one of them."""
    mark = _fresh_mark(template.source, text, variables)
    words = _words(control, variables)

    def inside(value: str) -> str:
        return words.sub(lambda match: f"{mark}{match[0][0]}{mark}{match[0][1:]}", value)

    def dense(value: str) -> str:
        return _within_blanks(value, lambda core: mark + "".join(character + mark for character in core))

    def sparse(value: str) -> str:
        return _within_blanks(inside(value), lambda core: mark + core + mark)

    def after(value: str) -> str:
        return words.sub(lambda match: match[0] + mark, value)

    for change, keys in ((dense, None), (dense, _CONTENTS), (sparse, None), (sparse, _CONTENTS), (inside, _CONTENTS)):
        try:
            marked = template.render_plain(_changed(variables, change, inside, keys))
        except TextError:
            continue  # the template refuses what it does not know; with fewer marks it may not
        if marked.replace(mark, "") == text:
            return _between(marked, mark)
    if not any(words.search(value) for value in _texts(variables)):
        return [(0, len(text))]
    marked = template.render_plain(_changed(variables, after, after, None))
    if marked.replace(mark, "") != text:
        raise TextError(
            "a message holds a control token's text, and the chat template rewrites it", fix="leave that text out"
        )
    return _around(text, marked, mark, words)


def _words(control: Words, variables: Mapping[str, Any]) -> re.Pattern[str]:
    """Matches those control tokens' texts that the caller's texts hold, in any case: templates may change that."""
    found = sorted(control.found("\0".join(_texts(variables)).lower()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found)) or "(?!)", re.IGNORECASE)


def _fresh_mark(source: str, text: str, variables: Mapping[str, Any]) -> str:
    used = {*source, *text}.union(*_texts(variables))
    while True:
        mark = chr(0xF0000 + secrets.randbelow(0xFFFE))
        if mark not in used:
            return mark


def _within_blanks(value: str, change: Callable[[str], str]) -> str:
    match = _EDGES.fullmatch(value)
    return f"{match[1]}{change(match[2])}{match[3]}" if match is not None and match[2] else value


def _between(marked: str, mark: str) -> list[Span]:
    """Where the parts between marks lie when the marks are out. Single characters are left out: next to a mark on both
    sides they may be a person's."""
    spans: list[Span] = []
    at = 0
    for part in marked.split(mark):
        if len(part) > 1:
            spans.append((at, at + len(part)))
        at += len(part)
    return spans


def _around(text: str, marked: str, mark: str, words: re.Pattern[str]) -> list[Span]:
    """The parts of `text` around those of `words` that end at a mark."""
    spans: list[Span] = []
    start = at = 0
    for part in marked.split(mark)[:-1]:
        at += len(part)
        for match in words.finditer(part):
            if match.end() == len(part):
                spans.append((start, at - len(match[0])))
                start = at
    return [*spans, (start, len(text))]


def _changed(
    variables: Mapping[str, Any], change: Change, least: Change, keys: frozenset[str] | None
) -> dict[str, Any]:
    """A copy of the template's variables, every text of the caller's changed: by `change` under `keys` (None: all but
    those that templates compare), by `least` elsewhere and in the names of properties."""

    def walk(value: Any, key: str | None) -> Any:
        if isinstance(value, str):
            whole = key in keys if keys is not None else key not in _COMPARED
            return change(value) if whole else least(value)
        if isinstance(value, dict):
            return {least(name): walk(item, name) for name, item in value.items()}
        return [walk(item, key) for item in value] if isinstance(value, list) else value

    return {name: walk(value, None) for name, value in variables.items()}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
