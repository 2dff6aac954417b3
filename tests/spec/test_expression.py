"""Expressions: every operator and function, None-safety, and that nothing is executed, however it is asked for."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferflow.errors import SpecError
from inferflow.spec.document import Where
from inferflow.spec.expression import FUNCTIONS, evaluate

CFG: dict[str, Any] = {
    "d": 8,
    "zero": 0,
    "off": False,
    "name": "tiny",
    "types": ["a", "b", "a"],
    "rope": {"type": "linear", "factor": 4.0},
    "null": None,
}
NAMES: dict[str, Any] = {"cfg": CFG, "i": 2, "words": ["x", "y"]}


def value(text: str) -> Any:
    return evaluate(text, NAMES, Where("s.toml", 3, 7))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3", 7), ("7 // 2", 3), ("7 / 2", 3.5), ("7 % 3", 1), ("-7 // 2", -4), ("2 ** -0.5", 2**-0.5),
        ("-cfg.d", -8), ("+cfg.d", 8), ("(1 + 2) * 3", 9), ("2 ** 10", 1024), ("0.1 + 0.2", 0.1 + 0.2),
        ("'ab' + 'cd'", "abcd"), ("[1] + [2, 3]", [1, 2, 3]), ("1, 2", [1, 2]), ("(1, [2, 3])", [1, [2, 3]]),
        ("1 < 2 < 3", True), ("1 < 3 < 2", False), ("1 == 1.0", True), ("'a' != 'b'", True), ("2 >= 2", True),
        ("2 <= 1", False), ("cfg.null is None", True), ("cfg.d is not None", True), ("'a' in cfg.types", True),
        ("'z' not in cfg.types", True), ("'rope' in cfg", True), ("'t' in cfg.name", True),
        ("True and 3", 3), ("0 or 5", 5), ("None or 0 or 7", 7), ("cfg.off and cfg.nothing // 2", False),
        ("not cfg.off", True), ("not 3", False), ("1 if cfg.off else 2", 2), ("cfg.d // 0 if cfg.off else 9", 9),
        ("cfg.types[i]", "a"), ("cfg.types[-2]", "b"), ("cfg['d']", 8), ("words[0]", "x"), ("cfg.rope.factor", 4.0),
        ("cfg.rope['type']", "linear"), ("  cfg.d  ", 8), ("'é' + 'ü'", "éü"),
    ],
)  # fmt: skip
def test_operators(text: str, expected: Any) -> None:
    assert value(text) == expected
    assert type(value(text)) is type(expected)


@pytest.mark.parametrize(
    "text",
    [
        "cfg.nothing",
        "cfg.__class__.__init__",
        "cfg.nothing.more",
        "cfg.null.a.b.c",
        "cfg.nothing[3]",
        "cfg.nothing['a'].b",
        "cfg['nothing']",
        "cfg.rope.none",
    ],
)
def test_what_is_missing_is_none(text: str) -> None:
    assert value(text) is None
    assert value(f"{text} or 5") == 5
    assert value(f"5 if {text} is None else 6") == 5
    assert value(f"'a' in {text}") is False
    assert value(f"'a' not in {text}") is True


FUNCTION_CASES = {
    "abs": ("abs(-3)", 3), "bool": ("bool(cfg.d)", True), "ceil": ("ceil(2.1)", 3), "floor": ("floor(-2.1)", -3),
    "endswith": ("endswith(cfg.name, 'ny')", True), "startswith": ("startswith(cfg.null, 'a')", False),
    "default": ("default(cfg.null, cfg.off, cfg.d // 0)", False), "is_list": ("is_list(cfg.types)", True),
    "exp": ("exp(1)", math.e), "log": ("log(8, 2)", 3.0), "sqrt": ("sqrt(cfg.d * 2)", 4.0),
    "expand": ("expand([[['g', 'l'], 2], [['l'], 1]])", ["g", "l", "g", "l", "l"]), "float": ("float('2.5')", 2.5),
    "int": ("int(2.9)", 2), "len": ("len(cfg.types)", 3), "max": ("max(1, cfg.d, 3)", 8), "min": ("min([4, 2])", 2),
    "round": ("round(2.567, 1)", 2.6), "round_to": ("round_to(55.43, 'bfloat16')",
    55.5), "sum": ("sum([1, 2, 3])", 6),
}  # fmt: skip


def test_every_function_has_a_case() -> None:
    assert FUNCTION_CASES.keys() == FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTION_CASES)
def test_functions(name: str) -> None:
    text, expected = FUNCTION_CASES[name]
    assert value(text) == pytest.approx(expected) if isinstance(expected, float) else value(text) == expected


def test_default_is_the_first_that_is_there() -> None:
    assert value("default(cfg.nothing, cfg.null)") is None
    assert value("default(cfg.nothing, 0, 5)") == 0
    assert value("default()") is None
    with pytest.raises(SpecError, match="takes no keywords"):
        value("default(a=1)")


def test_only_lists_and_tables_have_entries() -> None:
    assert value("[is_list(cfg.d), is_list(cfg.name), is_list(cfg.rope), is_list(cfg.null)]") == [False] * 4
    with pytest.raises(SpecError, match=r"'cfg\.d' is 8: it has no entries") as caught:
        value("cfg.d[i]")
    assert "is_list(x)" in caught.value.fix


def test_round_to_is_the_nearest_with_ties_to_even() -> None:
    assert value("round_to(1 + 1 / 256, 'bfloat16')") == 1.0
    assert value("round_to(1 + 3 / 256, 'bfloat16')") == 1 + 4 / 256
    assert value("round_to(1 / 3, 'float16')") == 0.333251953125
    assert value("round_to(1 / 3, 'float32')") == value("round_to(1 / 3, None)") == 1 / 3


HOSTILE = [
    "__import__('os').system('true')", "().__class__.__bases__", "i.__class__.__globals__", "open('/etc/passwd')",
    "eval('1')", "exec('1')", "getattr(cfg, 'd')", "cfg.get('d')", "cfg.name.upper()", "lambda: 1",
    "[x for x in words]",
    "{x: 1 for x in words}", "(x for x in words)", "{1, 2}", "{'a': 1}", "f'{cfg}'", "(y := 2)", "await x",
    "*words", "words[0:1]",
    "1 @ 2", "1 << 3", "1 | 2", "~1", "b'ab'", "1j", "...", "x = 1", "import os", "1; 2", "print(1)",
    "_private", "len(**cfg)",
    "(lambda: 1)()", "words[0]()", "len(len)", "globals()", "vars()", "type(1)", "1 if", "", "   ", "#",
    "yield 1", "assert 1",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_else_is_an_expression(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        value(text)
    assert caught.value.where.startswith("s.toml:3:")
    assert caught.value.fix


BOUNDS = [
    "9 ** 9 ** 9", "2 ** 64", "2 ** 63 + 1", "9" * 30, "10 ** 65", "(-8) ** 0.5", "1e300 ** 2",
    "1e300 * 1e300 - 'a'", "2.0 ** 65",
    "'a' * 9999999", "[0] * 9999999", "9999999 * 'a'", "1 / 0", "1 // 0", "1 % 0", "0 ** -1", "1 + None",
    "1 + 'a'", "-'a'", "-None",
    "1 < 'a'", "None < 1", "[1] < 2", "words[9]", "words['a']", "cfg[words]", "sqrt(-1)", "log(0)", "exp(1e9)",
    "int('x')", "int('9' + '9')() ",
    "sum(3)", "len(3)", "max([])", "min()", "round('a')", "expand(3)", "expand([[['a'], 99999]])",
    "expand([['a']])", "float('a')",
    "ceil(None)", "abs('x')", "sqrt(1, 2)", "round(1, ndigits=2)", "i.x", "cfg.d.e", "-" * 50 + "1",
    "(" * 400 + "1" + ")" * 400,
    " + ".join(["1"] * 500), "x" * 3000, "\0", "1 +\n", "int(1e400)",
]  # fmt: skip


@pytest.mark.parametrize("text", BOUNDS, ids=lambda text: repr(text[:20]))
def test_bounds(text: str) -> None:
    start = time.perf_counter()
    with pytest.raises(SpecError) as caught:
        value(text)
    assert time.perf_counter() - start < 2
    assert caught.value.where.startswith("s.toml:3:")
    assert len(str(caught.value)) < 900


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("zig", 8),
        ("1 + zig", 12),
        ("  zig", 10),
        ("'é' + zig", 14),
        ("1 + (2 * zig)", 17),
        ("len(zig)", 12),
        ("cfg.d // cfg.none", 17),
    ],
)
def test_the_column_is_that_of_the_fault(text: str, column: int) -> None:
    with pytest.raises(SpecError) as caught:
        value(text)
    assert caught.value.where == f"s.toml:3:{column}"


def test_a_suggestion_for_a_typo() -> None:
    with pytest.raises(SpecError, match="unknown name 'wrds'") as caught:
        value("wrds[0]")
    assert caught.value.fix == "did you mean 'words'?"


@given(st.text(alphabet="cfg.dnull 0123456789+-*/()[]'<>=,ioratend", max_size=40))
def test_any_text_is_a_value_or_a_spec_error(text: str) -> None:
    where = "s.toml:3:"
    try:
        value(text)
    except SpecError as error:
        where = error.where
    assert where.startswith("s.toml:3:")
