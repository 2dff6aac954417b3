"""`LLM`: the Python surface. Text or ids in, text, logits or any named tensor out.

from inferflow import LLM, SamplingParams
llm = LLM()                                    # the demo model; or a directory, a .gguf, "org/name", "pypi:package"
print(llm.generate("The capital of France is", SamplingParams(max_tokens=16)).text)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np

from .errors import ArgumentError, TextError, did_you_mean
from .runtime.engine import Engine, Event
from .runtime.engine import Sequence as Running
from .runtime.executor import ReferenceExecutor
from .runtime.model import Model, load_model
from .runtime.sampler import SamplingParams
from .text import Detokenizer, StopMatcher, Tokenizer, encode_chat, load_tokenizer
from .weights.locate import locate

__all__ = ["LLM", "Chunk", "Completion"]

DEFAULT_LENGTH = 8192
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """An answer. `finish` is ``stop`` (an end token, or `stop_string`) or ``length``; `ids` are the new tokens."""

    text: str
    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish: str
    stop_string: str | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: the text that became certain with `token`; `finish` is set on the last one."""

    text: str
    token: int | None
    finish: str | None = None
    stop_string: str | None = None


class LLM:
    """A model in this process. One thread at a time; use as a context manager to close its files.

    `model`: a directory, a ``.gguf``/``.safetensors``/``.bin`` file, ``org/name[:QUANT]``, ``pypi:PACKAGE[==VERSION]``, or
    None for the demo model. `spec`: a shipped spec's name or a ``.toml`` file; None finds it by the model's own config.
    `config` overrides keys of the model's config. `max_model_len` bounds prompt and answer together (default: what the model
    was made for, at most 8192). Raises FetchError, CheckpointError, SpecError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        spec: str | Path | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        engine: str = "reference",
        token_budget: int = 512,
        offline: bool = False,
    ) -> None:
        if engine != "reference":
            raise ArgumentError(f"there is no engine '{engine}'", where="engine", fix="use 'reference'")
        if token_budget < 1:
            raise ArgumentError(f"it is {token_budget}", where="token_budget", fix="it must be at least 1")
        self.path = locate(None if model is None else str(model), offline=offline)
        self.model: Model = load_model(self.path, spec, config)
        self.tokenizer: Tokenizer | None = load_tokenizer(self.model.source, self.path)
        self.max_model_len = self._length(max_model_len)
        self._engine = Engine(
            self.model.graph,
            ReferenceExecutor(self.model.graph, self.model.weights),
            max_len=self.max_model_len,
            eos=self.eos_ids,
            budget=token_budget,
        )

    def _length(self, asked: int | None) -> int:
        own = self.model.config.get("max_position_embeddings") or self.model.config.get("n_positions") or DEFAULT_LENGTH
        if asked is None:
            return min(int(own), DEFAULT_LENGTH)
        if not 1 <= asked <= 1 << 24:
            raise ArgumentError(f"it is {asked}", where="max_model_len", fix="it must be from 1 to 2^24")
        return asked

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer: the union of what the model's files declare."""
        if self.tokenizer is not None:
            return self.tokenizer.eos_ids
        generation = self.model.config.get("generation") or {}
        declared = [self.model.config.get("eos_token_id"), generation.get("eos_token_id")]
        flat = [i for d in declared for i in (d if isinstance(d, list) else [d])]
        return frozenset(i for i in flat if isinstance(i, int))

    # ------------------------------------------------------------------ generation

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> list[Completion]: ...
    def generate(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> Completion | list[Completion]:
        """Answer one prompt (a str: one Completion) or several (a list of str or of token ids: a list), batched together.

        `options` are fields of SamplingParams, instead of `params`.
        """
        sampling = _sampling(params, options)
        if isinstance(prompts, str):
            return self._complete([prompts], sampling)[0]
        return self._complete(list(prompts), sampling)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Chunk]:
        """The answer as it comes. The texts, put together, are `generate`'s. Closing the iterator stops the work."""
        sampling = _sampling(params, options)
        return self._stream(self._ids(prompt), sampling)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Answer a conversation, ``[{"role": "user", "content": "…"}, …]``, by the model's own chat template."""
        return self._complete([self.chat_ids(messages)], _sampling(params, options))[0]

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with what the model declares around it (BOS)."""
        return self._need_tokenizer().encode(text)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids of a conversation, ready for the answer. What users wrote never becomes a control token."""
        return encode_chat(self._need_tokenizer(), messages)

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[Chunk]:
        answer = _Answer(self, ids, params, 0)
        try:
            for event in self._engine.run():
                chunk = answer.take(event)
                if chunk.token is not None:
                    yield chunk
                if chunk.finish:
                    return
        finally:
            self._engine.abort(answer.sequence)

    def _complete(self, prompts: list[Prompt], params: SamplingParams) -> list[Completion]:
        all_ids = [self._ids(p) for p in prompts]
        answers: list[_Answer] = []
        try:
            answers.extend(_Answer(self, ids, params, n) for n, ids in enumerate(all_ids))
            by_sequence = {id(a.sequence): a for a in answers}
            for event in self._engine.run():
                by_sequence[id(event.sequence)].take(event)
        finally:
            for answer in answers:
                self._engine.abort(answer.sequence)
        return [a.completion() for a in answers]

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        ids: Sequence[object] = prompt
        if not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in ids):
            raise ArgumentError("a prompt is a str or a list of token ids", where="prompt", fix="pass text, or ints")
        return [int(i) for i in prompt]

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            fix = "add its tokenizer.json, or pass token ids"
            raise TextError("the model has no tokenizer", where=str(self.path), fix=fix)
        return self.tokenizer

    # ------------------------------------------------------------------ research

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Next-token logits at every position, float32 [len(ids), vocab]."""
        return self._engine.forward(self._ids(ids))["logits"]

    def forward(self, ids: Sequence[int], capture: Sequence[str]) -> dict[str, np.ndarray]:
        """The named tensors of a run over `ids`, float32, first axis the tokens: ``["layers.3.attn_norm", "logits"]``.

        `tensor_names` lists the names. Raises ArgumentError for one that is not there.
        """
        names = self.model.graph.names
        for name in capture:
            if name not in names:
                fix = did_you_mean(name, names) or "llm.tensor_names lists them"
                raise ArgumentError(f"there is no tensor '{name}'", where="capture", fix=fix)
        return self._engine.forward(self._ids(ids), list(capture))

    @property
    def tensor_names(self) -> list[str]:
        """Every name that `forward` can capture."""
        return list(self.model.graph.names)

    def close(self) -> None:
        """Close the model's files."""
        self.model.source.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Answer:
    """One sequence on its way to text: detokeniser and stop strings."""

    def __init__(self, llm: LLM, ids: list[int], params: SamplingParams, index: int) -> None:
        self.sequence: Running = llm._engine.add(ids, params, index)
        self.engine = llm._engine
        self.detokenizer = None if llm.tokenizer is None else Detokenizer(llm.tokenizer, continuation=True)
        self.stops = StopMatcher(list(params.stop))
        self.pieces: list[str] = []
        self.finish: str | None = None

    def take(self, event: Event) -> Chunk:
        """The text that `event` makes certain."""
        if event.sequence is not self.sequence or self.finish is not None:
            return Chunk("", None)
        ended = event.token in self.engine.eos and event.finish == "stop"
        text = ""
        if self.detokenizer is not None and event.token is not None and not ended:
            text = self.detokenizer.push(event.token)
        if event.finish is not None and self.detokenizer is not None:
            text += self.detokenizer.flush()
        text = self.stops.feed(text)
        self.finish = event.finish
        if self.stops.matched is not None:
            self.finish = "stop"
            self.engine.abort(self.sequence)
        elif event.finish is not None:
            text += self.stops.flush()
        self.pieces.append(text)
        return Chunk(text, event.token, self.finish, self.stops.matched)

    def completion(self) -> Completion:
        ids = self.sequence.ids
        prompt = self.sequence.prompt
        return Completion(
            "".join(self.pieces), tuple(ids[prompt:]), tuple(ids[:prompt]), self.finish or "length", self.stops.matched
        )


def _sampling(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    if params is not None and options:
        raise ArgumentError(
            "give SamplingParams or keywords, not both", where="params", fix="put all in SamplingParams"
        )
    if params is not None:
        return params
    known = SamplingParams.__dataclass_fields__
    for name in options:
        if name not in known:
            fix = did_you_mean(name, known) or f"there are {', '.join(known)}"
            raise ArgumentError("there is no such sampling parameter", where=name, fix=fix)
    return SamplingParams(**options)
