"""Token texts to bytes: the three alphabets in which vocabularies are written.

* byte-level: every byte is one printable character (the map of byte-level BPE vocabularies);
* metaspace: U+2581 stands for a space and ``<0xNN>`` for one byte (SentencePiece);
* wordpiece: ``##`` continues a word, anything else begins one after a space.

Literal tokens (control and user-defined ones) are their own text in all three.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

__all__ = [
    "BYTE_TOKEN",
    "METASPACE",
    "PieceDecoder",
    "byte_alphabet",
    "decode_byte_level",
    "decode_metaspace",
    "decode_wordpiece",
]

PieceDecoder = Callable[[str], bytes]

METASPACE = "\u2581"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@cache
def byte_alphabet() -> tuple[str, ...]:
    """The character of each byte 0..255: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


@cache
def _byte_of() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_alphabet())}


def decode_byte_level(text: str) -> bytes:
    """Bytes of a byte-level token; a character outside the alphabet (an odd added token) is its own UTF-8."""
    table = _byte_of()
    try:
        return bytes([table[character] for character in text])
    except KeyError:
        parts = [bytes([table[c]]) if c in table else c.encode("utf-8", "replace") for c in text]
        return b"".join(parts)


def decode_metaspace(text: str) -> bytes:
    """Bytes of a SentencePiece token: ``<0xNN>`` is that byte, U+2581 a space."""
    match = BYTE_TOKEN.match(text)
    if match:
        return bytes([int(match[1], 16)])
    return text.replace(METASPACE, " ").encode("utf-8", "replace")


def decode_wordpiece(text: str) -> bytes:
    """Bytes of a WordPiece token: the continuation mark goes, a new word has a space before it."""
    return (text[2:] if text.startswith("##") else " " + text).encode("utf-8", "replace")
