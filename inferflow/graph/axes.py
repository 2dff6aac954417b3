"""Named axes: every tensor's shape is a tuple of `Axis`, and shape errors speak in their names.

``tokens`` has no fixed size. An axis made of a product (``heads*head_dim``) remembers its factors, so that `heads` can split
it and a partitioner can cut it on a head boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import GraphError

__all__ = ["TOKENS", "Axis", "Shape", "broadcast", "show"]

MAX_NAME = 4000


@dataclass(frozen=True)
class Axis:
    """`size` is None for ``tokens`` (and ``rows``), whose number changes from step to step."""

    name: str
    size: int | None
    factors: tuple[Axis, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME:
            raise GraphError(f"an axis is put together from too many: {self.name[:60]}…", fix="use fewer")

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}={self.size}"

    def split(self, n: int, names: tuple[str, str]) -> tuple[Axis, Axis]:
        """The axis as (n, size/n), named by its own factors where they fit; GraphError when `n` does not divide it."""
        if self.size is None or n <= 0 or self.size % n:
            raise GraphError(f"axis {self} cannot be cut into {n} heads", fix="check the number of heads and the width")
        if len(self.factors) == 2 and self.factors[0].size == n:
            return self.factors[0], self.factors[1]
        return Axis(names[0], n), Axis(names[1], self.size // n)


Shape = tuple[Axis, ...]
TOKENS = Axis("tokens", None)
ONE = Axis("1", 1)


def show(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def joined(outer: Axis, inner: Axis) -> Axis:
    """The axis that flattening (`outer`, `inner`) gives."""
    assert outer.size is not None
    assert inner.size is not None
    return Axis(f"{outer.name}*{inner.name}", outer.size * inner.size, (outer, inner))


def fits(a: Axis, b: Axis) -> bool:
    if a.size is None or b.size is None:
        return a.name == b.name
    return a.size == b.size


def alignment(small: Shape, large: Shape) -> tuple[int, ...] | None:
    """The positions in `large` of the axes of `small`: by name where that works, else from the right; None if neither."""
    positions: list[int] = []
    at = 0
    for axis in small:
        while at < len(large) and large[at] != axis:
            at += 1
        if at == len(large):
            break
        positions.append(at)
        at += 1
    else:
        return tuple(positions)
    offset = len(large) - len(small)
    pairs = zip(small, large[offset:], strict=True)
    return tuple(range(offset, len(large))) if all(fits(a, b) or a.size == 1 or b.size == 1 for a, b in pairs) else None


def broadcast(a: Shape, b: Shape) -> Shape:
    """The shape of an element-wise operation on `a` and `b`; GraphError in the axes' names when they do not fit."""
    small, large = (a, b) if len(a) < len(b) else (b, a)
    where = alignment(small, large)
    if where is None:
        fix = "the axes must agree by name and size, or one must have size 1"
        raise GraphError(f"{show(a)} and {show(b)} cannot be combined", fix=fix)
    out = list(large)
    for axis, at in zip(small, where, strict=True):
        if out[at].size == 1 and axis.size != 1:
            out[at] = axis
    return tuple(out)
