"""The environment in which chat templates run: Jinja's immutable sandbox, with every operation metered.

On top of the sandbox (no attributes with underscores, no mutation, no imports) a template can neither make large values
nor run for long; see `limits`. Each way in which a template can make a value is covered: literals, ``~`` and loops by
rewriting the parsed template, operators and calls by the sandbox's hooks, filters by wrapping them, captured blocks by the
environment's `concat`. Filters that no chat template needs are left out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from . import bounds
from .limits import LimitError, Meter, Ticking, ticking

__all__ = ["ChatEnvironment", "TemplateRefusal"]

# fmt: off
_FILTERS = (
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "forceescape", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max",
    "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string",
    "sum", "title", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
)
# fmt: on
_IMPORTS = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class TemplateRefusal(jinja2.TemplateError):
    """Raised by a template itself, through ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}`` … ``{% endgeneration %}``: marks the assistant's text for training; renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Metered(NodeTransformer):
    """Rewrites a parsed template so that literals, concatenations and loops pass through the meter."""

    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)
        return _call_filter(nodes.List(node.nodes), "~concat", node.lineno)

    def visit_For(self, node: nodes.For, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call_filter(node.iter, "~loop", node.lineno)
        return node

    def _literal(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        return _call_filter(node, "~literal", node.lineno)

    visit_List = visit_Tuple = visit_Dict = _literal


def _call_filter(node: Any, name: str, line: int) -> nodes.Node:
    return nodes.Filter(node, name, [], [], None, None).set_lineno(line)


class _SafeNamespace(Namespace):
    """``namespace()``: plain attributes only, and no text that shows what it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        values = dict(*positional, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def _raise_exception(message: Any = "") -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 256:
        raise LimitError("formats a date with more than 256 characters")
    return datetime.now().strftime(form)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """See the module. Rendering happens inside `metered`; one environment serves many threads."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        # Constant folding would run operations before any meter does.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols], cache_size=0
        )
        self._meters: ContextVar[Meter] = ContextVar("meter")
        # With the context as an argument it is not called while the template is compiled.
        self.finalize = jinja2.pass_context(lambda context, value: self._text(value))
        self.concat = self._concat  # type: ignore[method-assign]
        self.globals = {
            "range": self.globals["range"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _SafeNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters = {name: self._wrap_filter(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = self._tojson
        self.filters["~concat"] = lambda parts: self._concat(map(self._text, parts))
        self.filters["~loop"] = self._loop
        self.filters["~literal"] = lambda value: self.meter.value(value)

    @property
    def meter(self) -> Meter:
        return self._meters.get()

    @contextmanager
    def metered(self, meter: Meter) -> Iterator[None]:
        """Rendering inside is charged to `meter`."""
        token = self._meters.set(meter)
        try:
            yield
        finally:
            self._meters.reset(token)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(_IMPORTS):
            raise SecurityError(f"line {node.lineno}: a chat template cannot import or include anything")
        _Metered().visit(tree)
        return tree

    # Values on their way through the template.

    def _text(self, value: Any) -> str:
        """``str(value)``, which is bounded since every container is."""
        text = value if isinstance(value, str) else str(value)
        self.meter.text(len(text))
        return text

    def _concat(self, parts: Iterable[str]) -> str:
        found = list(parts)
        self.meter.text(sum(map(len, found)))
        return "".join(found)

    def _loop(self, items: Any) -> Any:
        return items if isinstance(items, Undefined) else Ticking(items, self.meter)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As chat templates expect it: no escapes for HTML."""
        if (indent if isinstance(indent, int) else len(indent or "")) > 64:
            raise LimitError("indents JSON by more than 64 characters")
        self.meter.value(value)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        parts: list[str] = []
        for part in encoder.iterencode(value):
            self.meter.text(len(part))
            parts.append(part)
        return self._concat(parts)

    # Operations.

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        bounds.check_operator(self.meter, operator, left, right)
        return self.meter.value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        meter = __self.meter
        meter.step()
        meter.weight(args)
        meter.weight(kwargs)
        args = bounds.check_call(meter, __obj, args, kwargs)
        return meter.value(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.meter.step()
        found = super().getitem(obj, argument)
        return self.meter.value(found) if isinstance(argument, slice) else found

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.meter.step()
        return super().getattr(obj, attribute)

    def _wrap_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        context_first = hasattr(function, "jinja_pass_arg")

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            meter = self.meter
            meter.step()
            passed, given = (args[:1], args[1:]) if context_first else ((), args)
            given = bounds.check_filter(meter, name, given, kwargs)
            result = function(*passed, *given, **kwargs)
            return ticking(result, meter) if hasattr(result, "__next__") else meter.value(result)

        return metered
