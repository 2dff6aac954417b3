"""The grammar of flows, and the types of parameters."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest

from inferflow.errors import SpecError
from inferflow.spec.document import Leaf, Where, make_table
from inferflow.spec.flow import parse_flow
from inferflow.spec.signature import ACTIVATIONS, TYPES, check_type, parse_signature

HERE = Where("s.toml", 4, 2)


def flow(*lines: Any) -> Any:
    return parse_flow(Leaf([Leaf(line, HERE) for line in lines], HERE))


def test_the_three_kinds_of_assignment() -> None:
    one, two, three = flow("x = f(x)", "a, b = f(x), g(x, n=3, **t)", "x *= 2 + y")
    assert one.targets == ("x",)
    assert two.targets == ("a", "b")
    assert three.targets == ("x",)
    assert ast.unparse(three.value) == "x * (2 + y)"
    assert three.text == "x *= 2 + y"
    assert three.where == HERE
    assert flow("  x = y  ")[0].targets == ("x",)


@pytest.mark.parametrize(
    "line",
    ["f(x)", "x", "x = 1; y = 2", "x = y = 3", "x.a = 1", "x[0] = 1", "(a, b.c) = f(x)", "[a, b] = f(x)",
     "x: int = 3", "*a, b = f(x)",
     "import os", "del x", "def f(): pass", "for i in x: pass", "x = [y for y in z]", "x = lambda: 1",
     "x = f'{y}'", "x = (y := 1)",
     "x = __import__('os')", "_x = _y", "", "#", "x = ", "x @= y", "x = y @ z", "x = {1: 2}", "x = await y",
     "return x", "x = y\nz = 1"],
)  # fmt: skip
def test_nothing_else_is_a_line(line: str) -> None:
    with pytest.raises(SpecError) as caught:
        flow(line)
    assert caught.value.where.startswith("s.toml:4:")
    assert caught.value.fix


@pytest.mark.parametrize("node", [Leaf("x = 1", HERE), Leaf([], HERE), Leaf(3, HERE), make_table({"a": 1}, HERE)])
def test_a_flow_is_a_list(node: Any) -> None:
    with pytest.raises(SpecError, match="a flow is a list of 1 to 200 assignments"):
        parse_flow(node)


def test_a_flow_has_an_end() -> None:
    with pytest.raises(SpecError, match="1 to 200"):
        flow(*["x = x"] * 201)


# ------------------------------------------------------------------------------------------------ signatures


def parameter(text: Any) -> Any:
    return parse_signature(make_table({"p": text}, HERE))["p"]


GOOD: list[tuple[str, Any, Any]] = [
    ("int", 3, 3), ("int", 3.0, 3), ("int", -1, -1), ("axis", 8, 8), ("axis", 8.0, 8), ("number", 2, 2),
     ("number", 0.5, 0.5),
    ("bool", True, True), ("act", "swish", "silu"), ("act", "gelu_new", "gelu_tanh"), ("list", [1], [1]),
     ("list", (1,), (1,)),
    ("table", {"a": 1}, {"a": 1}), ("any", "x", "x"), ("any", None, None), ("half | inter", "half", "half"),
    ("int = None", None, None), ("table = None", None, None),
]  # fmt: skip
BAD: list[tuple[str, Any]] = [
    ("int", 3.5), ("int", True), ("int", "3"), ("int", None), ("axis", 0), ("axis", -1), ("axis", 1 << 31),
     ("number", "1"),
    ("number", True), ("number", math.nan), ("number", math.inf), ("bool", 1), ("bool", "true"), ("act",
     "sillu"), ("act", None),
    ("list", "ab"), ("table", 3), ("table", [1]), ("half | inter", "both"), ("half | inter", 1), ("int = 3", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value", "expected"), GOOD)
def test_values_of_the_type(text: str, value: Any, expected: Any) -> None:
    got = check_type(parameter(text), value, HERE)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(("text", "value"), BAD)
def test_values_of_another(text: str, value: Any) -> None:
    with pytest.raises(SpecError, match="'p' must be") as caught:
        check_type(parameter(text), value, HERE)
    assert caught.value.where == "s.toml:4:2"
    assert caught.value.fix


def test_every_type_is_tried() -> None:
    tried = {text.partition(" =")[0] for text, *_ in GOOD}
    assert set(TYPES) <= tried


def test_defaults_and_choices() -> None:
    p = parameter("half | inter = inter")
    assert (p.choices, p.default_text, p.optional) == (("half", "inter"), "inter", False)
    assert parameter("int = heads * 2").default_text == "heads * 2"
    assert parameter("int").default is None
    assert parameter("number = None").optional
    assert set(parameter("act").choices) == set(ACTIVATIONS)


@pytest.mark.parametrize(
    "text", ["integer", "integer = 3", "", "= 3", "a | ", "a b | c", "int = 3 +", "int = __import__('os')", 3, True]
)
def test_what_is_no_signature(text: Any) -> None:
    with pytest.raises(SpecError) as caught:
        parameter(text)
    assert caught.value.fix
