"""How large the result of an operation would be, found out before the operation is done; see `limits`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .limits import LimitError, Meter

__all__ = ["check_call", "check_filter", "check_operator"]

_MAX_BITS = 20_000
_MAX_COUNT = 10_000
_NUMBER = re.compile(r"\d+", re.ASCII)
_LONG_NUMBER = re.compile(r"\d{5}", re.ASCII)
_NESTED_SPEC = re.compile(r"\{[^{}]*\{")
_PADDING = frozenset(["center", "ljust", "rjust", "zfill"])
_REFUSED_METHODS = frozenset(["encode", "translate", "maketrans", "to_bytes", "from_bytes", "fromhex"])
_COUNTED_FILTERS = frozenset(["batch", "slice", "round"])


def check_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Refuses ``+``, ``*``, ``**`` and ``%`` whose result would be too large."""
    meter.step()
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
            raise LimitError("makes a number that is too large")
    elif operator == "*":
        _check_product(meter, left, right)
    elif operator == "%" and isinstance(left, str):
        _check_format(meter, left, right if isinstance(right, (tuple, Mapping)) else (right,))
    elif operator == "+" and isinstance(left, (list, tuple, str)) and isinstance(right, (list, tuple, str)):
        meter.text(len(left) + len(right))


def _check_product(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise LimitError("makes a number that is too large")
        return
    times, sequence = (left, right) if isinstance(left, int) else (right, left)
    if isinstance(times, int) and isinstance(sequence, (str, list, tuple)):
        weight = len(sequence) if isinstance(sequence, str) else meter.weight(sequence)
        meter.text(weight * max(times, 0))


def _check_format(meter: Meter, form: str, values: Any) -> None:
    """A ``%`` or ``{}`` format: widths are short and written out, and all values fit as often as they can be named."""
    if _LONG_NUMBER.search(form) or ("*" in form and "%" in form) or _NESTED_SPEC.search(form):
        raise LimitError("formats a text with a width that is too large or not written out")
    weight = meter.weight(values)
    once = isinstance(values, tuple) and "{" not in form  # every value is used once, in order
    fields = form.count("%") + form.count("{")
    meter.text(len(form) + sum(map(int, _NUMBER.findall(form))) + (weight if once else fields * weight))


def check_call(meter: Meter, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuses a call of a text's or number's method whose result would be too large; the arguments to call it with."""
    bound = getattr(function, "__wrapped__", function)  # the sandbox wraps `str.format`
    owner, name = getattr(bound, "__self__", None), getattr(bound, "__name__", "")
    if isinstance(owner, (bytes, bytearray)) or name in _REFUSED_METHODS:
        raise LimitError(f"calls {name}, which chat templates may not")
    if not isinstance(owner, str):
        return args
    if name in _PADDING:
        meter.text(len(owner) + _count(args, kwargs))
    elif name == "expandtabs":
        meter.text(len(owner) + owner.count("\t") * (_count(args, kwargs) or 8))
    elif name == "replace":
        _check_replace(meter, owner, args, kwargs)
    elif name == "join":
        return _check_join(meter, owner, args)
    elif name in ("format", "format_map"):
        _check_format(meter, owner, [*args, kwargs])
    return args


def _count(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The largest whole number among the arguments."""
    return max((value for value in (*args, *kwargs.values()) if isinstance(value, int)), default=0)


def _check_replace(meter: Meter, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    given = [*args, *(kwargs[key] for key in ("old", "new") if key in kwargs)]
    if len(given) >= 2:
        old, new = str(given[0]), str(given[1])
        meter.text(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_join(meter: Meter, separator: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args:
        return args
    items = args[0] if isinstance(args[0], (list, tuple, str, Mapping)) else list(args[0])
    meter.text(meter.weight(items) + len(separator) * len(items))
    return (items, *args[1:])


def check_filter(meter: Meter, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuses a filter whose result would be too large; the arguments to call it with."""
    meter.weight(args[1:])
    value = args[0] if args else ""
    if name in _COUNTED_FILTERS and _count(args[1:], kwargs) > _MAX_COUNT:
        raise LimitError(f"{name} with a number over {_MAX_COUNT}")
    if name == "center":
        meter.text(len(str(value)) + (_count(args[1:], kwargs) or 80))
    elif name == "indent":
        width = next((w for w in (*args[1:2], kwargs.get("width")) if w is not None), 4)
        text = str(value)
        meter.text(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))
    elif name == "replace":
        _check_replace(meter, str(value), args[1:], kwargs)
    elif name == "format":
        _check_format(meter, str(value), [*args[1:], kwargs])
    elif name == "join":
        return _check_join_filter(meter, args, kwargs)
    elif name == "sum" and any(isinstance(start, (str, list, tuple)) for start in (*args[2:], kwargs.get("start"))):
        raise LimitError("sums something other than numbers")
    return args


def _check_join_filter(meter: Meter, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    if not args:
        return args
    separator = args[1] if len(args) > 1 else kwargs.get("d", "")
    return (*_check_join(meter, str(separator), args[:1]), *args[1:])
