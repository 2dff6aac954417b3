"""One interface over inference engines, each in a process of its own.

`Peer` is the caller's end: it starts ``python -m tests.bench.peers ENGINE MODEL`` and turns calls into JSON lines on the
worker's stdin and stdout, so that memory, threads and crashes of engines do not mix. A worker between two calls waits for
a line and uses no CPU, so several may be alive while one of them is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

__all__ = ["ENGINES", "Batched", "Engine", "Peer", "PeerError", "Scorer"]

Floats = npt.NDArray[np.float32]

# name: the class, imported by the worker only
ENGINES = {
    "inferflow": "tests.bench.peer_inferflow:Inferflow",
    "llama.cpp": "tests.bench.peer_llama_cpp:LlamaCpp",
    "openvino": "tests.bench.peer_openvino:OpenVino",
}

ROOT = Path(__file__).resolve().parents[2]


class PeerError(RuntimeError):
    """An engine refused a model or a call, or its process died."""


class Batched(NamedTuple):
    """Tokens a second of all sequences together."""

    prefill: float  # of prompts, until every sequence has its first token
    decode: float  # of output, after that
    total: float  # of output, over both


class Engine(Protocol):
    """A loaded model. Every call runs on random tokens that no call before it has seen, so no prompt cache can help; end
    of text stops nothing; rates are tokens a second of one run, the first of which is slower than later ones."""

    def __init__(self, path: str, threads: int) -> None: ...

    def prefill(self, tokens: int) -> float:
        """Of one prompt, up to its first output token."""

    def decode(self, tokens: int, context: int) -> float:
        """Of `tokens` steps of one sequence after a prompt of `context` tokens, which is not counted."""

    def batched(self, sequences: int, prompt: int, output: int) -> Batched:
        """Of `sequences` that start together, each with a prompt and an output of these lengths."""


class Scorer(Engine, Protocol):
    """An engine that shows its logits."""

    def tokenize(self, text: str) -> list[int]:
        """The text's tokens, with the special ones that the model wants around a prompt."""

    def logits(self, tokens: Sequence[int], first: int) -> Floats:
        """``[len(tokens) - first, vocabulary]``: what follows each token from number `first` on."""


class Peer:
    """A `Scorer` in another process; a context manager. PeerError for whatever the engine raises, and for a call that
    it does not have. Calls are not thread-safe."""

    def __init__(self, engine: str, model: Path | str, threads: int = 2) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="inferflow-bench-")
        self._log = Path(self._scratch.name) / "log"
        with self._log.open("wb") as log:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.peers", engine, os.fspath(model), "--threads", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                text=True,
            )
        self.pid = self._worker.pid
        try:
            self._answer()
        except PeerError:
            self.close()
            raise

    def prefill(self, tokens: int = 512) -> float:
        return float(self._call("prefill", tokens))

    def decode(self, tokens: int = 128, context: int = 128) -> float:
        return float(self._call("decode", tokens, context))

    def batched(self, sequences: int = 16, prompt: int = 128, output: int = 128) -> Batched:
        return Batched(*self._call("batched", sequences, prompt, output))

    def tokenize(self, text: str) -> list[int]:
        return cast(list[int], self._call("tokenize", text))

    def logits(self, tokens: Sequence[int], first: int = 0) -> Floats:
        path = Path(self._scratch.name) / "logits.npy"
        self._call("logits", list(tokens), first, save=os.fspath(path))
        values: Floats = np.load(path)
        path.unlink()
        return values

    def close(self) -> None:
        """Ends the process. May be called again."""
        cast(IO[str], self._worker.stdin).close()
        try:
            self._worker.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._worker.kill()
            self._worker.wait()
        cast(IO[str], self._worker.stdout).close()
        self._scratch.cleanup()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, *arguments: object, save: str | None = None) -> Any:
        line = json.dumps({"call": name, "arguments": arguments, "save": save})
        with contextlib.suppress(BrokenPipeError):  # then `_answer` finds the process dead, and says why
            print(line, file=self._worker.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        line = cast(IO[str], self._worker.stdout).readline()
        if not line:
            log = self._log.read_text(errors="replace").strip()[-2000:]
            raise PeerError(f"the process ended with status {self._worker.wait()}: {log}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["result"]


def _load(engine: str, model: str, threads: int) -> Engine:
    module, _, name = ENGINES[engine].partition(":")
    return cast(Engine, getattr(importlib.import_module(module), name)(model, threads))


def _serve(engine: Engine, line: str) -> object:
    """The result of one call; an array goes into the file that the caller names, JSON is no place for it."""
    request = json.loads(line)
    method = getattr(engine, request["call"], None)
    if method is None:
        raise PeerError(f"this engine has no {request['call']}")
    result = method(*request["arguments"])
    if request["save"]:
        np.save(request["save"], result)
        return None
    return cast(object, result)


def main() -> None:
    """The worker: answers ``{"result": …}`` or ``{"error": …}`` once when loaded, and then once a line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        engine = _load(options.engine, options.model, options.threads)
    except Exception as error:
        answer(error=f"{options.model}: {error}")
        return
    answer(result=None)
    for line in sys.stdin:
        try:
            answer(result=_serve(engine, line))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
