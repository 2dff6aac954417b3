"""A request's fields to `SamplingParams`. Names are OpenAI's, and vLLM's for what OpenAI's API does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError
from ..runtime.recommended import recommended_params
from ..runtime.sampling_params import SamplingParams
from ..spec.expression import show
from ..text import Tokenizer
from .body import Fields
from .errors import bad

__all__ = ["Asked", "model_defaults", "take_sampling"]

# Fields of SamplingParams under their own names, which check what they are given.
SAME = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "fsd_alpha", "fsd_k", "fsd_n", "fsd_beta", "fsd_random", "n", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "allowed_token_ids", "max_tokens", "prompt_logprobs", "dry_breaker_ids",
)  # fmt: skip
MAX_BAD_WORDS = 1000
MAX_CHOICES = 10_000


@dataclass
class Asked:
    """What a request asks for. `values` are for SamplingParams; `bad_words` still are text; `names` lead from SamplingParams'
    names to the request's."""

    values: dict[str, Any]
    bad_words: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def params(self, tokenizer: Tokenizer | None) -> SamplingParams:
        """Raises ArgumentError. Encodes `bad_words`, so it belongs off the loop."""
        words = [ids for word in self.bad_words for ids in _spellings(word, tokenizer)]
        return SamplingParams(**self.values | {"bad_token_ids": words})


def model_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a request gets that says nothing: what the model's own files recommend, else OpenAI's temperature of 1."""
    return {"temperature": 1.0} | recommended_params(config)[0]


def take_sampling(fields: Fields, defaults: Mapping[str, Any]) -> Asked:
    """All that is the same for every route."""
    taken = {name: fields.take(name) for name in SAME}
    asked = Asked({**defaults, **{name: value for name, value in taken.items() if value is not None}})
    seed = fields.take("seed")
    if type(seed) is int and -(1 << 63) <= seed < 0:
        seed += 1 << 64  # OpenAI's are signed
    if seed is not None:
        asked.values["seed"] = seed
    bias = fields.table("logit_bias")
    if bias is not None:
        asked.values["logit_bias"] = {_token(name): value for name, value in bias.left.items()}
    words = fields.list("bad_words") or []
    if len(words) > MAX_BAD_WORDS or not all(isinstance(word, str) and word.strip() for word in words):
        raise bad("bad_words", "it is no list of words", f"pass up to {MAX_BAD_WORDS} strings, none empty")
    asked.bad_words, asked.names["bad_token_ids"] = words, "bad_words"
    best = fields.take("best_of")
    if best is not None and best != asked.values.get("n", 1):
        raise bad(
            "best_of", f"it is {show(best)}, and choosing among answers is not served", "leave it out", "unsupported"
        )
    for kind, source, name in _structures(fields):
        if kind in asked.names:
            raise bad(name, f"{asked.names[kind]} asks for a structure, too", "use one of them")
        asked.values[kind], asked.names[kind] = source, name
    return asked


def _token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 20):
        raise bad("logit_bias", f"{show(name)} is no token id", "its keys are ids, as strings of digits")
    return int(name)


def _spellings(word: str, tokenizer: Tokenizer | None) -> list[list[int]]:
    """A word at the beginning of a text, and after a space."""
    if tokenizer is None:
        raise ArgumentError("the model has no tokenizer", where="bad_token_ids", fix="use logit_bias")
    return [ids for text in (word.lstrip(), f" {word.lstrip()}") if (ids := tokenizer.encode(text, add_bos=False))]


def _structures(fields: Fields) -> list[tuple[str, Any, str]]:
    """(SamplingParams' name, source, the request's name) of each structure that is asked for."""
    found: list[tuple[str, Any, str]] = []
    wrapped = fields.table("structured_outputs")
    for table, prefix, at in ((fields, "guided_", ""), (wrapped, "", "structured_outputs.")):
        if table is None:
            continue
        json_name = "guided_json" if table is fields else "json"
        found += _known("json_schema", _schema(table.take(json_name), at + json_name), at + json_name)
        for kind in ("regex", "grammar"):
            found += _known(kind, table.take(prefix + kind), at + prefix + kind)
        choices = table.list(f"{prefix}choice")
        if choices is not None:
            found.append(("grammar", _one_of(choices, f"{at}{prefix}choice"), f"{at}{prefix}choice"))
        if table.flag(f"{prefix}json_object"):
            found.append(("json_schema", {"type": "object"}, f"{at}{prefix}json_object"))
        if table is wrapped:
            table.done()
    for kind in ("json_schema", "regex", "grammar"):  # as SamplingParams calls them
        source = fields.take(kind)
        found += _known(kind, _schema(source, kind) if kind == "json_schema" else source, kind)
    form = fields.table("response_format")
    if form is not None:
        found += _known("json_schema", _response_format(form), "response_format")
    return found


def _known(kind: str, source: Any, name: str) -> list[tuple[str, Any, str]]:
    return [] if source is None else [(kind, source, name)]


def _schema(value: Any, name: str) -> Any:
    if value is not None and not isinstance(value, dict | str):
        raise bad(name, f"it is {show(value)}", "pass a JSON schema, as an object or as text")
    return value


def _one_of(choices: list[Any], name: str) -> str:
    """A grammar of the given texts."""
    if not 0 < len(choices) <= MAX_CHOICES or not all(isinstance(choice, str) and choice for choice in choices):
        raise bad(name, "it is no list of texts", f"pass 1 to {MAX_CHOICES} strings, none empty")
    return f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"


def _response_format(form: Fields) -> Any:
    kind = form.text("type")
    if kind in (None, "text", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else None
    elif kind == "json_schema":
        inner = form.table("json_schema")
        if inner is None:
            raise bad("response_format.json_schema", "it is missing", 'pass {"name": …, "schema": …}')
        for ignored in ("name", "description", "strict"):
            inner.take(ignored)
        schema = _schema(inner.take("schema"), "response_format.json_schema.schema")
        schema = {} if schema is None else schema
        inner.done()
    else:
        raise bad("response_format.type", f"it is {show(kind)}", "use text, json_object or json_schema")
    form.done()
    return schema
