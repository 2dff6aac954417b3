"""`SamplingParams`: everything a request may say about how its tokens are chosen, checked before anything runs.

Names are those that other engines made common, so that a request for one of them means the same here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..spec.expression import show

__all__ = ["SamplingParams", "number", "whole"]

GREEDY = 1e-5  # a lower temperature is greedy: its inverse would leave float32
MAX_IDS = 1 << 20
MAX_STOP = 1000  # characters: a stop is looked for in every character of an answer
MAX_SOURCE = 1 << 20  # characters of a schema, a regex or a grammar


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Values out of range raise ArgumentError.

    Length: `max_tokens` None is 128, or what fits; before `min_tokens` no end token comes; `stop` are strings that end the
    text (and are not part of it), `stop_token_ids` ids that do, with `ignore_eos` or without; `n` answers to one prompt.

    Filters: `temperature` 0 is greedy; `top_k` 0 or -1, `tfs_z` 1, `typical_p` 1, `top_p` 1 and `min_p` 0 are off;
    `mirostat` 2 (with its target `mirostat_tau` in bits and rate `mirostat_eta`) takes the place of all five. `seed` None
    draws a fresh one.

    Penalties: `repetition_penalty` 1 and `presence_penalty`, `frequency_penalty`, `dry_multiplier` 0 are off; DRY looks back
    over `dry_penalty_last_n` tokens (-1: all), and no match crosses one of `dry_breaker_ids`.

    `logit_bias` is added to logits, by id; only `allowed_token_ids` may come (None: all), and none of `bad_token_ids`, where
    a list of ids is a word whose last token is forbidden after the others.

    FSD (Yang et al. 2023, arXiv:2305.12675): `fsd_alpha` above 0 takes, of the `fsd_k` likeliest tokens, the one with the
    greatest ``(1 - alpha) p - alpha q``, where q is a model of `fsd_n`-grams of the text so far, smoothed by `fsd_beta`. With
    `fsd_random` half of the first ten tokens are sampled instead.

    `logprobs` and `prompt_logprobs`: how many of the likeliest tokens are reported beside the one that came (None: nothing);
    of the model's own distribution, before penalties, temperature and filters.

    Structured output: at most one of `json_schema` (a dict, or JSON), `regex` and `grammar` (Lark's notation).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    n: int = 1
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    typical_p: float = 1.0
    tfs_z: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breaker_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int | Sequence[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    fsd_alpha: float = 0.0
    fsd_k: int = 6
    fsd_n: int = 3
    fsd_beta: float = 0.9
    fsd_random: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._normalise()
        for name, good, want in _checks(self):
            if not good:
                raise ArgumentError(f"it is {show(getattr(self, name))}", where=name, fix=f"it must be {want}")
        for name, clash, reason, fix in _clashes(self):
            if clash:
                raise ArgumentError(reason, where=name, fix=fix)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, whatever the filters say."""
        return self.temperature < GREEDY

    @property
    def structured(self) -> tuple[str, str | Mapping[str, Any]] | None:
        """The kind (``json_schema``, ``regex`` or ``grammar``) and the source of the structure asked for."""
        for kind in ("json_schema", "regex", "grammar"):
            source = getattr(self, kind)
            if source is not None:
                return kind, source
        return None

    def check_vocabulary(self, size: int) -> None:
        """Raises ArgumentError for a token id that is not below `size`."""
        lists: list[tuple[str, Iterable[int]]] = [
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_token_ids", (i for word in self.bad_token_ids for i in _word(word))),
            ("dry_breaker_ids", self.dry_breaker_ids),
        ]
        for name, ids in lists:
            numbers = list(ids)
            if name != "bad_token_ids" and len(numbers) > size:
                reason = f"it has {len(numbers)} token ids, and the vocabulary {size}"
                raise ArgumentError(reason, where=name, fix="name none twice")
            worst = max(numbers, default=0)
            if worst >= size:
                reason = f"token id {show(worst)} is not in the vocabulary"
                raise ArgumentError(reason, where=name, fix=f"ids go to {size - 1}")

    def _normalise(self) -> None:
        """NumPy's numbers become Python's; one stop string, none, or any collection of them becomes a tuple."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, np.integer | np.floating):
                object.__setattr__(self, name, value.item())
        given: object = self.stop
        object.__setattr__(self, "stop", (given,) if isinstance(given, str) else given)
        for name in ("stop", "stop_token_ids", "dry_breaker_ids", "bad_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, _tuple(getattr(self, name), none=name == "allowed_token_ids"))
        object.__setattr__(self, "bad_token_ids", _words(self.bad_token_ids))
        bias: object = self.logit_bias
        if isinstance(bias := {} if bias is None else bias, Mapping):
            object.__setattr__(self, "logit_bias", {_plain(i): _plain(b) for i, b in bias.items()})


def _checks(p: SamplingParams) -> Iterator[tuple[str, bool, str]]:
    """(field, whether its value is good, what it must be)."""
    yield "temperature", number(p.temperature, 0, 100), "a number from 0 to 100"
    yield "top_k", whole(p.top_k, -1), "a whole number, 0 for off"
    for name in ("top_p", "typical_p", "tfs_z"):
        value = getattr(p, name)
        yield name, number(value, 0, 1) and value > 0, "above 0 and at most 1"
    yield "min_p", number(p.min_p, 0, 1) and p.min_p < 1, "at least 0 and below 1"
    yield "seed", p.seed is None or whole(p.seed, 0, (1 << 64) - 1), "a whole number below 2^64"
    yield "max_tokens", p.max_tokens is None or whole(p.max_tokens, 1), "at least 1"
    yield "min_tokens", whole(p.min_tokens, 0), "a whole number, 0 for off"
    yield "n", whole(p.n, 1, 128), "a whole number from 1 to 128"
    strings: object = p.stop
    good = isinstance(strings, tuple) and len(strings) <= 64 and all(map(_stop, strings))
    yield "stop", good, f"up to 64 strings, of 1 to {MAX_STOP} characters"
    yield "stop_token_ids", _ids(p.stop_token_ids), "a list of token ids"
    yield "dry_breaker_ids", _ids(p.dry_breaker_ids), "a list of token ids"
    yield "allowed_token_ids", p.allowed_token_ids is None or (_ids(p.allowed_token_ids) and len(p.allowed_token_ids) > 0), (
        "a list of token ids, not empty"
    )  # fmt: skip
    bad: object = p.bad_token_ids
    good = isinstance(bad, tuple) and len(bad) <= MAX_IDS and all(_ids(_word(word)) and _word(word) for word in bad)
    yield "bad_token_ids", good, "a list of token ids, or of lists of them, none empty"
    bias: object = p.logit_bias
    good = isinstance(bias, Mapping) and _ids(tuple(bias)) and all(number(b, -100, 100) for b in bias.values())
    yield "logit_bias", good, "a table from token ids to numbers from -100 to 100"
    for name in ("ignore_eos", "fsd_random"):
        yield name, isinstance(getattr(p, name), bool), "True or False"
    yield "mirostat", whole(p.mirostat, 0, 2) and p.mirostat != 1, "0 (off) or 2"
    yield "mirostat_tau", number(p.mirostat_tau, 0, 100) and p.mirostat_tau > 0, "above 0 and at most 100"
    yield "mirostat_eta", number(p.mirostat_eta, 0, 1) and p.mirostat_eta > 0, "above 0 and at most 1"
    yield "repetition_penalty", number(p.repetition_penalty, 1e-3, 100), "a number from 0.001 to 100, 1 for off"
    for name in ("presence_penalty", "frequency_penalty"):
        yield name, number(getattr(p, name), -2, 2), "a number from -2 to 2"
    yield "dry_multiplier", number(p.dry_multiplier, 0, 100), "a number from 0 to 100"
    yield "dry_base", number(p.dry_base, 1, 8), "a number from 1 to 8"
    yield "dry_allowed_length", whole(p.dry_allowed_length, 1), "at least 1"
    yield "dry_penalty_last_n", whole(p.dry_penalty_last_n, -1), "a whole number, -1 for all"
    for name in ("logprobs", "prompt_logprobs"):
        yield name, getattr(p, name) is None or whole(getattr(p, name), 0, 1024), "a whole number from 0 to 1024"
    yield "fsd_alpha", number(p.fsd_alpha, 0, 1), "a number from 0 to 1"
    yield "fsd_k", whole(p.fsd_k, 1, 1024), "a whole number from 1 to 1024"
    yield "fsd_n", whole(p.fsd_n, 1, 16), "a whole number from 1 to 16"
    yield "fsd_beta", number(p.fsd_beta, 0, 1), "a number from 0 to 1"
    yield "json_schema", p.json_schema is None or isinstance(p.json_schema, Mapping) or _source(p.json_schema), (
        "a dict or JSON text, of at most a million characters"
    )  # fmt: skip
    for name in ("regex", "grammar"):
        good = getattr(p, name) is None or _source(getattr(p, name))
        yield name, good, "text, not empty, of at most a million characters"


def _clashes(p: SamplingParams) -> Iterator[tuple[str, bool, str, str]]:
    """(field, whether it contradicts another, the reason, the fix)."""
    reason = f"it is {p.min_tokens}, and max_tokens is {p.max_tokens}"
    yield "min_tokens", p.max_tokens is not None and p.min_tokens > p.max_tokens, reason, "raise max_tokens"
    filters = p.top_k > 0 or min(p.top_p, p.typical_p, p.tfs_z) < 1 or p.min_p > 0
    yield "mirostat", p.mirostat > 0 and filters, "it takes the place of the other filters", "leave the others out"
    fix = "set temperature, 1.0 for example"
    yield "mirostat", p.mirostat > 0 and p.greedy, "it samples, and temperature 0 does not", fix
    yield "fsd_random", p.fsd_random and p.greedy, "it samples, and temperature 0 does not", fix
    reason, fix = "it is a kind of FSD, which is off", "set fsd_alpha, 0.5 for example"
    yield "fsd_random", p.fsd_random and p.fsd_alpha == 0, reason, fix
    yield "mirostat", p.mirostat > 0 and p.fsd_alpha > 0, "it and FSD both choose the token", "use one of them"
    fix = "leave ignore_eos out"
    yield "ignore_eos", p.ignore_eos and p.structured is not None, "a structure ends with an end token", fix
    structures = [name for name in ("json_schema", "regex", "grammar") if getattr(p, name) is not None]
    reason = f"{' and '.join(structures[:-1])} asks for a structure, too"
    yield "".join(structures[-1:]), len(structures) > 1, reason, "use one of them"


def number(value: object, low: float, high: float) -> bool:
    """Whether `value` is a finite int or float, and no bool, within these bounds."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    return (integer or (isinstance(value, float) and math.isfinite(value))) and low <= value <= high  # type: ignore[operator]


def whole(value: object, low: int, high: int = (1 << 63) - 1) -> bool:
    """Whether `value` is an int, and no bool, within these bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _ids(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_IDS and all(whole(i, 0) for i in value)


def _stop(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_STOP


def _source(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_SOURCE


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.integer | np.floating) else value


def _tuple(value: Any, none: bool) -> Any:
    """A collection as a tuple; None too, unless `none` means something; what is no collection as it is, to be refused."""
    if value is None:
        return None if none else ()
    fine = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return tuple(_plain(item) for item in value) if fine else value


def _words(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return tuple(_tuple(word, none=True) if isinstance(word, Iterable) else word for word in value)


def _word(word: Any) -> Any:
    """A word of one token may be given as its id."""
    return word if isinstance(word, tuple) else (word,)
