"""Chat templates: messages to the text that a model was trained on.

The template is Jinja and comes with the model, so it runs in a metered sandbox (`sandbox`, `limits`) and sees plain copies
of what it is given. Rendering equals the ``apply_chat_template`` that template authors test with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import TextError
from .limits import LimitError, Meter
from .messages import checked, plain
from .tokenizer import Tokenizer

__all__ = ["ChatTemplate"]

_WHERE = "chat template"
_MAX_SOURCE = 128 << 10
_FIX = "fix the template, or pass another one"
# Templates that take content in parts say so: they loop over it, or ask what it is.
_TAKES_PARTS = re.compile(
    r"""for\s+\w+\s+in\s+\w+(\.content|\[['"]content['"]\])|content['"]?\]?\s+is\s+(not\s+)?(string|iterable|sequence|mapping)"""
)


class ChatTemplate:
    """A compiled template. `bos`, `eos` and `tokens` are what it sees as ``bos_token``, ``eos_token`` and the like.

    `seconds` is the CPU time that one rendering may take. TextError for a template that is too long, does not compile,
    or imports anything.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str | None = None,
        eos: str | None = None,
        tokens: Mapping[str, str] | None = None,
        seconds: float = 5.0,
    ) -> None:
        if len(source) > _MAX_SOURCE:
            raise TextError(f"longer than {_MAX_SOURCE} characters", where=_WHERE, fix="pass a shorter one")
        named = {"bos_token": bos, "eos_token": eos}
        self.source = source
        self.tokens = {**(tokens or {}), **{name: text for name, text in named.items() if text is not None}}
        self.takes_parts = _TAKES_PARTS.search(source) is not None
        self._seconds = seconds
        self._compile(source)

    def _compile(self, source: str) -> None:
        # Imported here: it takes a tenth of a start-up, and plain text needs no template.
        from jinja2 import TemplateSyntaxError

        from .sandbox import ChatEnvironment

        self._environment = ChatEnvironment()
        try:
            with self._environment.metered(Meter(0, self._seconds)):
                self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TextError(f"line {error.lineno}: {error.message}", where=_WHERE, fix=_FIX) from None
        except Exception as error:  # the compiler fails in many ways on hostile input
            raise TextError(f"does not compile: {_sentence(error)}", where=_WHERE, fix=_FIX) from None

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
        """The template of a model (or `source`, with that model's tokens); TextError where the model has none."""
        source = source if source is not None else tokenizer.chat_template
        if source is None:
            raise TextError("the model has no chat template", fix="pass one, or generate from plain text")
        return cls(source, tokens=tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt. `extra` are further variables of the template. TextError for messages that are malformed (see
        `messages.checked`), that the template refuses, or that it fails on."""
        return self.render_plain(self.variables(messages, add_generation_prompt, tools, extra))

    def variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        extra: Mapping[str, Any],
    ) -> dict[str, Any]:
        """All that the template sees, checked and copied, the model's tokens left out."""
        return {
            **plain(extra, "template variables"),
            "messages": checked(messages, as_parts=self.takes_parts),
            "tools": plain(tools, "tools"),
            "documents": plain(extra.get("documents"), "documents"),
            "add_generation_prompt": add_generation_prompt,
        }

    def render_plain(self, variables: Mapping[str, Any]) -> str:
        """The prompt from what `variables` returned."""
        from .sandbox import TemplateRefusal

        values = {**self.tokens, **variables}
        meter = Meter(_characters(values), self._seconds)
        parts: list[str] = []
        try:
            with self._environment.metered(meter):
                for part in self._template.generate(**values):
                    meter.text(len(part))
                    parts.append(part)
        except TemplateRefusal as error:
            raise TextError(str(error.message), where=_WHERE, fix="the template refuses these messages") from None
        except Exception as error:  # whatever the template's expressions raise is the template's failure
            raise TextError(f"fails: {_sentence(error)}", where=_WHERE, fix=_FIX) from None
        return "".join(parts)


def _sentence(error: Exception) -> str:
    if isinstance(error, LimitError):
        return f"it {error}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) or type(error).__name__


def _characters(value: Any) -> int:
    """Characters in all the strings of plain values."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _characters(item) for key, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, list) else 0
