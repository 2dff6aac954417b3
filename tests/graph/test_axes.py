"""Named axes: how they split, join and combine, and what an error calls them."""

from __future__ import annotations

import pytest

from inferflow.errors import GraphError
from inferflow.graph.axes import ONE, TOKENS, Axis, alignment, broadcast, joined, show

D, HEADS, HD, FF = Axis("d", 8), Axis("H", 4), Axis("hd", 2), Axis("ff", 12)


def test_a_product_remembers_its_factors() -> None:
    both = joined(HEADS, HD)
    assert str(both) == "H*hd=8"
    assert both.split(4, ("heads", "head_dim")) == (HEADS, HD)
    assert both.split(2, ("heads", "head_dim")) == (Axis("heads", 2), Axis("head_dim", 4))
    assert D.split(4, ("heads", "head_dim")) == (Axis("heads", 4), Axis("head_dim", 2))


@pytest.mark.parametrize("n", [0, -1, 3, 16])
def test_what_does_not_divide(n: int) -> None:
    with pytest.raises(GraphError, match="axis d=8 cannot be cut into") as caught:
        D.split(n, ("a", "b"))
    assert caught.value.fix
    with pytest.raises(GraphError):
        TOKENS.split(2, ("a", "b"))


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((TOKENS, D), (TOKENS, D), (TOKENS, D)),
        ((TOKENS, D), (D,), (TOKENS, D)),
        ((D,), (TOKENS, D), (TOKENS, D)),
        ((TOKENS, ONE), (TOKENS, D), (TOKENS, D)),
        ((TOKENS, D), (TOKENS, ONE), (TOKENS, D)),
        ((TOKENS, D), (ONE,), (TOKENS, D)),
        ((TOKENS, HEADS, HD), (TOKENS,), (TOKENS, HEADS, HD)),  # by name: one number a token
        ((TOKENS, HEADS, HD), (HEADS,), (TOKENS, HEADS, HD)),  # by name: one number a head
        ((TOKENS, HEADS, HD), (HD,), (TOKENS, HEADS, HD)),
        ((TOKENS, HEADS, HD), (HEADS, HD), (TOKENS, HEADS, HD)),
        ((TOKENS, D), (Axis("width", 8),), (TOKENS, D)),  # by size where the names differ
    ],
)
def test_broadcasting(a: tuple[Axis, ...], b: tuple[Axis, ...], out: tuple[Axis, ...]) -> None:
    assert broadcast(a, b) == out


@pytest.mark.parametrize(
    ("a", "b"), [((TOKENS, D), (TOKENS, FF)), ((TOKENS, D), (FF,)), ((D,), (TOKENS,)), ((HEADS, TOKENS), (D, FF))]
)
def test_what_cannot_be_combined(a: tuple[Axis, ...], b: tuple[Axis, ...]) -> None:
    with pytest.raises(GraphError, match="cannot be combined") as caught:
        broadcast(a, b)
    assert show(a) in caught.value.reason
    assert show(b) in caught.value.reason
    assert caught.value.fix


def test_alignment_prefers_names_to_the_right_edge() -> None:
    square = (TOKENS, Axis("a", 4), Axis("b", 4))
    assert alignment((Axis("a", 4),), square) == (1,)
    assert alignment((Axis("b", 4),), square) == (2,)
    assert alignment((Axis("c", 4),), square) == (2,)
    assert alignment((FF,), square) is None
