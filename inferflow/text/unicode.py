"""Small helpers on malformed text."""

from __future__ import annotations

__all__ = ["well_formed"]


def well_formed(text: str) -> str:
    """`text` with every lone surrogate (a byte that was no UTF-8, or a stray half of a pair) replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
