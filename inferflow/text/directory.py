"""A `Tokenizer` from a directory: ``tokenizer.json`` and the configuration files beside it.

Read are ``tokenizer.json`` (the `tokenizers` library's format), ``tokenizer_config.json``, ``special_tokens_map.json``,
``config.json``, ``generation_config.json`` and the chat template in ``chat_template.jinja`` or ``chat_template.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine

from ..errors import TextError
from .decoders import decoder_of
from .engine import EngineBackend
from .tables import turn_enders
from .tokenizer import Tokenizer, Vocabulary
from .unicode import well_formed

__all__ = ["load_directory"]

_MAX_BYTES = 512 << 20
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_directory(path: Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None where it holds no ``tokenizer.json``; TextError for broken files."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    return _Directory(path, _open_engine(file)).tokenizer()


def _open_engine(file: Path) -> Engine:
    if file.stat().st_size > _MAX_BYTES:
        raise TextError(f"larger than {_MAX_BYTES >> 20} MiB", where=str(file), fix="a tokenizer.json is much smaller")
    try:
        engine = Engine.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are no `Exception`
        raise TextError(f"not a readable tokenizer: {error}", where=str(file), fix="fetch the file again") from None
    engine.no_truncation()
    engine.no_padding()
    return engine


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not file.is_file():
        return {}
    if file.stat().st_size > _MAX_BYTES:
        raise TextError(f"larger than {_MAX_BYTES >> 20} MiB", where=str(file), fix="fetch the file again")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TextError(f"not readable JSON: {error}", where=str(file), fix="fetch the file again") from None
    if not isinstance(data, dict):
        raise TextError("holds no JSON object", where=str(file), fix="fetch the file again")
    return data


def _content(value: Any) -> str | None:
    """A token's text, given as such or as an object with its flags."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return well_formed(value) if isinstance(value, str) and value else None


class _Directory:
    """The files of one directory, and the engine with the tokens they add."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path = path
        self.engine = engine
        self.tokenizer_config = _read_json(path / "tokenizer_config.json")
        self.special_map = _read_json(path / "special_tokens_map.json")
        self.configs = [_read_json(path / "config.json"), _read_json(path / "generation_config.json")]
        self.names = dict(self._names())
        self._add_declared_tokens()

    def _names(self) -> Iterator[tuple[str, str]]:
        for name in _NAMED:
            text = _content(self.tokenizer_config.get(name)) or _content(self.special_map.get(name))
            if text is not None:
                yield name, text

    def _more_specials(self) -> Iterator[str]:
        for table in (self.tokenizer_config, self.special_map):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                values = table.get(key)
                listed = values.values() if isinstance(values, Mapping) else values
                for value in listed if isinstance(listed, Iterable) and not isinstance(listed, str) else [listed]:
                    text = _content(value)
                    if text is not None:
                        yield text

    def _add_declared_tokens(self) -> None:
        """Tokens that only the configuration files declare join the engine's, as they do in the reference."""
        known = {token.content for token in self.engine.get_added_tokens_decoder().values()}
        declared = self.tokenizer_config.get("added_tokens_decoder")
        entries = declared.items() if isinstance(declared, Mapping) else ()
        for _, entry in sorted((pair for pair in entries if str(pair[0]).isdecimal()), key=lambda pair: int(pair[0])):
            text = _content(entry)
            if text is None or text in known or not isinstance(entry, Mapping):
                continue
            flags = {
                flag: bool(entry[flag]) for flag in ("lstrip", "rstrip", "single_word", "normalized") if flag in entry
            }
            token = AddedToken(text, special=bool(entry.get("special", False)), **flags)
            (self.engine.add_special_tokens if token.special else self.engine.add_tokens)([token])
            known.add(text)
        missing = [text for text in (*self.names.values(), *self._more_specials()) if text not in known]
        specials = [text for text in dict.fromkeys(missing) if self.engine.token_to_id(text) is not None]
        if specials:
            self.engine.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])

    def tokenizer(self) -> Tokenizer:
        engine = self.engine
        added = engine.get_added_tokens_decoder()
        control = {token.content: token_id for token_id, token in added.items() if token.special}
        decode_piece, strip = decoder_of(engine, where=str(self.path / "tokenizer.json"))
        bos = self._bos_id()
        prefix, suffix = self._around(bos)
        size = max(engine.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        return Tokenizer(
            Vocabulary(
                tokens=_EngineTokens(engine, size),
                decode_piece=decode_piece,
                control=frozenset(control.values()),
                literal=frozenset(added),
                bos_id=bos,
                eos_ids=self._eos_ids(control),
                prefix=prefix,
                suffix=suffix,
                strip_leading_space=strip,
                chat_template=self._chat_template(),
                names=self.names,
            ),
            EngineBackend(engine, control, self._id_of("unk_token")),
        )

    def _id_of(self, name: str) -> int | None:
        text = self.names.get(name)
        return None if text is None else self.engine.token_to_id(text)

    def _declared_ids(self, key: str) -> Iterator[int]:
        for config in self.configs:
            texts = config.get("text_config")
            for table in (config, texts if isinstance(texts, Mapping) else {}):
                value = table.get(key)
                for token in value if isinstance(value, list) else [value]:
                    if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                        yield token

    def _bos_id(self) -> int | None:
        token = self._id_of("bos_token")
        return token if token is not None else next(self._declared_ids("bos_token_id"), None)

    def _eos_ids(self, control: Mapping[str, int]) -> frozenset[int]:
        named = {self._id_of("eos_token")} | {
            self.engine.token_to_id(text) for text in [_content(self.special_map.get("eos_token"))] if text
        }
        enders = turn_enders()
        ends = {token for text, token in control.items() if text in enders}
        return frozenset({*(token for token in named if token is not None), *self._declared_ids("eos_token_id"), *ends})

    def _around(self, bos: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the model wants before and after a text: what the engine's post-processor adds, else as configured."""
        if self.engine.post_processor is None:
            config, eos = self.tokenizer_config, self._id_of("eos_token")
            return (
                (bos,) if config.get("add_bos_token") and bos is not None else (),
                (eos,) if config.get("add_eos_token") and eos is not None else (),
            )
        bare = self.engine.encode("a", add_special_tokens=False).ids
        full = self.engine.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if bare and full[start : start + len(bare)] == bare:
                return tuple(full[:start]), tuple(full[start + len(bare) :])
        return tuple(full) if not bare else (), ()

    def _chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TextError(f"cannot be read: {error}", where=str(file), fix="save it as UTF-8 text") from None
        for value in (
            _read_json(self.path / "chat_template.json").get("chat_template"),
            self.tokenizer_config.get("chat_template"),
        ):
            if isinstance(value, str):
                return value
            if isinstance(value, list):  # several, by name
                named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
                if isinstance(named.get("default"), str):
                    return str(named["default"])
        return None


class _EngineTokens(Sequence[str]):
    """The engine's token texts by id, read on demand; empty for an id without a token."""

    def __init__(self, engine: Engine, size: int) -> None:
        self._engine = engine
        self._size = size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[token] for token in range(*index.indices(self._size))]
        if not 0 <= index < self._size:
            raise IndexError(index)
        return self._engine.id_to_token(index) or ""
