"""Positions in TOML: every key's value knows its line and column, whatever the way it was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferflow.errors import SpecError
from inferflow.spec.document import Leaf, Node, Table, make_table, parse_toml


def at(text: str, *path: str | int) -> tuple[int, int]:
    node: Node = parse_toml(text, "f.toml")
    for key in path:
        node = node.value[key] if isinstance(node, Leaf) else node[str(key)]
    return node.where.line, node.where.column


DOCUMENT = '''\
# a comment with = and [brackets]
top = 1   # another

[let]
a = "x"
long_name   =   "y"
"quoted key" = 3
'single.key' = 4
b.c.d = 5
  indented = true

[layers.attn]   # header
list = [ 1, "two", [3, 4], { five = 5 } ]
inline = { p = 1, q = { r = "s" }, "t u" = 2 }
many = [
  "first",   # with a comment ] here
  'second = [',

  "third",
]
text = """
several
lines"""
after = 1
raw = \'\'\'a " b\'\'\'
escaped = "a \\" b"   # "
ünï = "ö"
"é" = "ü" # after
nach = { "ß" = 1 }

[layers."a.b"]
x = 1e3
'''.replace("ünï = ", '"ünï" = ')


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (("top",), (2, 7)),
        (("let",), (4, 1)),
        (("let", "a"), (5, 5)),
        (("let", "long_name"), (6, 17)),
        (("let", "quoted key"), (7, 16)),
        (("let", "single.key"), (8, 16)),
        (("let", "b", "c", "d"), (9, 9)),
        (("let", "b", "c"), (9, 7)),
        (("let", "indented"), (10, 14)),
        (("layers",), (12, 1)),
        (("layers", "attn"), (12, 1)),
        (("layers", "attn", "list"), (13, 8)),
        (("layers", "attn", "list", 1), (13, 13)),
        (("layers", "attn", "list", 2, 1), (13, 24)),
        (("layers", "attn", "list", 3, "five"), (13, 37)),
        (("layers", "attn", "inline"), (14, 10)),
        (("layers", "attn", "inline", "q", "r"), (14, 29)),
        (("layers", "attn", "inline", "t u"), (14, 44)),
        (("layers", "attn", "many", 0), (16, 3)),
        (("layers", "attn", "many", 1), (17, 3)),
        (("layers", "attn", "many", 2), (19, 3)),
        (("layers", "attn", "text"), (21, 8)),
        (("layers", "attn", "after"), (24, 9)),
        (("layers", "attn", "raw"), (25, 7)),
        (("layers", "attn", "escaped"), (26, 11)),
        (("layers", "attn", "ünï"), (27, 9)),
        (("layers", "attn", "é"), (28, 7)),
        (("layers", "attn", "nach", "ß"), (29, 16)),
        (("layers", "a.b", "x"), (32, 5)),
    ],
    ids=lambda value: ".".join(map(str, value)),
)
def test_places(path: tuple[str | int, ...], place: tuple[int, int]) -> None:
    found = at(DOCUMENT, *path)
    if path == ("let", "b", "c"):
        assert found[0] == place[0]  # a dotted key has no place of its own: anywhere on its line
    else:
        assert found == place
    assert at(DOCUMENT.replace("\n", "\r\n"), *path) == found


def test_an_explicit_header_is_the_place_of_a_table_that_was_implied_before() -> None:
    text = "[a.b.c]\nx = 1\n\n[a.b]\ny = 2\n"
    assert at(text, "a") == (1, 1)
    assert at(text, "a", "b") == (4, 1)
    assert at(text, "a", "b", "c") == (1, 1)


def test_values_are_what_toml_says() -> None:
    table = parse_toml('a = "x\\u00e9"\nb = [1, 2.5]\n[c]\nd = false\n', "f.toml")
    assert table == make_table({"a": "xé", "b": [1, 2.5], "c": {"d": False}})
    assert list(table) == ["a", "b", "c"]
    assert len(table) == 3
    assert table.table("missing") == Table({})


def test_a_byte_order_mark_is_no_character() -> None:
    assert at("\ufeffa = 1\n", "a") == (1, 5)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("a = \n", 1, 5),
        ("a = 1\nb = [1,\n", 3, 1),
        ("a = 1\na = 2\n", 2, 6),
        ("[a]\n[a]\n", 2, 3),
        ('x = "open\n', 1, 10),
    ],
)
def test_what_is_not_toml(text: str, line: int, column: int) -> None:
    with pytest.raises(SpecError, match="not valid TOML") as caught:
        parse_toml(text, "f.toml")
    assert caught.value.where == f"f.toml:{line}:{column}"
    assert "(at " not in caught.value.reason


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "{ a = " * 3000, "a" + ".a" * 20000 + " = 1"])
def test_depth_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_toml(text, "f.toml")


@given(st.text(max_size=60))
def test_any_text_is_a_table_or_a_spec_error(text: str) -> None:
    where = "f.toml"
    try:
        assert isinstance(parse_toml(text, "f.toml"), Table)
    except SpecError as error:
        where = error.where
    assert where.startswith("f.toml")


@given(st.lists(st.text(alphabet="ab \"'#=[]{}.\\,é\n", max_size=8), min_size=1, max_size=5))
def test_every_place_holds_the_value(words: list[str]) -> None:
    """Literal strings written by a writer that knows nothing of the scanner: each is found where it starts."""
    body = ", ".join('"' + "".join(f"\\u{ord(c):04x}" if c in '"\\\n' else c for c in word) + '"' for word in words)
    text = f"k = [ {body} ]\n[t]\nlast = 1\n"
    table = parse_toml(text, "f.toml")
    items = table["k"]
    assert isinstance(items, Leaf)
    assert [item.value for item in items.value] == words
    assert all(text.split("\n")[0][item.where.column - 1] == '"' for item in items.value)
    assert table.table("t")["last"].where.line == 3
