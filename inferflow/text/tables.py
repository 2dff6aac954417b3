"""The tables of names that vocabularies use, read from the data package `model_specs`.

`pretokenizers.toml` says what a GGUF file's tokenizer words stand for, `turn_enders.toml` which words end a chat turn.
Both are read once per process and are never changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ..errors import TextError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Pretokenizer", "listed", "pretokenizer", "pretokenizer_names", "tokenizer_kind", "turn_enders"]


@dataclass(frozen=True)
class Pretokenizer:
    """How text is cut before byte-pair merges: `splits` in order; see ``model_specs/pretokenizers.toml``."""

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


@cache
def _table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(resources.files("model_specs").joinpath(name).read_text(encoding="utf-8"))
    return table


def listed(names: Iterable[str]) -> str:
    """The names, sorted, as words of a sentence."""
    return ", ".join(sorted(names))


def tokenizer_kind(model: str, *, where: str) -> str:
    """``tokenizer.ggml.model`` -> "byte-bpe" | "sentencepiece" | "unigram" | "wordpiece"; TextError if unknown."""
    kinds: dict[str, str] = _table("pretokenizers.toml")["kinds"]
    if model not in kinds:
        raise TextError(
            f"unknown tokenizer.ggml.model '{model}'", where=where, fix=f"this engine reads {listed(kinds)}"
        )
    return kinds[model]


def pretokenizer(name: str, *, where: str) -> Pretokenizer:
    """The pre-tokenizer that ``tokenizer.ggml.pre`` names; TextError, listing the known ones, if unknown."""
    table = _table("pretokenizers.toml")
    names: dict[str, str] = table["names"]
    if name not in names:
        hint = did_you_mean(name, names)
        raise TextError(
            f"unknown pre-tokenizer '{name}' (tokenizer.ggml.pre){'; ' + hint if hint else ''}",
            where=where,
            fix=f"pass pretokenizer=NAME, one of {listed(names)}",
        )
    pattern = table["patterns"][names[name]]
    return Pretokenizer(
        tuple(pattern["splits"]), bool(pattern.get("ignore_merges", False)), bool(pattern.get("add_bos", False))
    )


def pretokenizer_names() -> list[str]:
    """The names that ``tokenizer.ggml.pre`` may have."""
    return sorted(_table("pretokenizers.toml")["names"])


def turn_enders() -> frozenset[str]:
    """The words that end a chat turn where a vocabulary marks them as control tokens."""
    return frozenset(_table("turn_enders.toml")["words"])
