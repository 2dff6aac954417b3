"""Comparing a model with transformers: the same checkpoint, the same tokens, float32 on both sides.

Also token by token through the cache, and, where the logits differ, layer by layer: the first that departs is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from inferflow.errors import UnsupportedError
from inferflow.graph.graph import Graph
from inferflow.llm import LLM

__all__ = ["compare"]

DEPARTS = 1e-3  # of a layer's greatest value: far above rounding, far below a fault


def compare(path: Path, spec: str | None, prompt: str, tokens: int, tolerance: float) -> dict[str, Any]:
    """``ok``, ``max_difference``, ``max_logit``, ``same_top``, ``tokens``, ``made_up`` (no tokenizer: ids are counted up),
    ``cached_equal`` and, when it is not ok, ``departs``: the first place whose values differ.

    `tolerance` is relative to the greatest logit (at least 1). UnsupportedError where transformers cannot do its part.
    """
    oracle = _Oracle(path)
    # float32 throughout: what a spec rounds to the checkpoint's own dtype, transformers does not round here either
    with LLM(path, spec, config={"dtype": "float32", "torch_dtype": "float32"}) as llm:
        vocab = llm.model.graph.vocab
        ids = llm.encode(prompt) if llm.tokenizer else [3 + n % max(vocab - 3, 1) for n in range(tokens)]
        ids = [i % vocab for i in ids][: llm.max_model_len]
        ours, want = llm.logits(ids), oracle.logits(ids)
        width = min(ours.shape[1], want.shape[1])
        difference, greatest = float(np.abs(ours[:, :width] - want[:, :width]).max()), float(np.abs(want).max())
        ok = difference <= tolerance * max(1.0, greatest)
        return {
            "ok": ok,
            "tokens": len(ids),
            "made_up": llm.tokenizer is None,
            "max_difference": difference,
            "max_logit": greatest,
            "same_top": int((ours.argmax(-1) == want.argmax(-1)).sum()),
            "cached_equal": bool(np.array_equal(llm.logits(ids, chunk=1), ours)),
            "departs": None if ok else _first_departure(llm, oracle, ids),
        }


class _Oracle:
    """transformers' model of a checkpoint. Whatever goes wrong inside it says nothing about the spec, and is told so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import torch
            import transformers
        except ImportError:
            fix = "pip install 'inferflow[torch]' transformers"
            raise UnsupportedError("transformers and torch are not installed", where="verify", fix=fix) from None
        hf: Any = transformers  # its annotations are not complete
        hf.utils.logging.disable_progress_bar()
        hf.utils.logging.set_verbosity_error()
        self.torch = torch
        # eager: the plain formulas, which have no conditions on widths
        options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
        options |= {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path if path.is_dir() else path.parent
        try:
            self.model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, **options)
            self.model.eval()
        except Exception as error:
            raise self._failed(error) from None

    def logits(self, ids: list[int]) -> np.ndarray:
        """Float32 [tokens, vocab]."""
        return self._run(ids).logits[0].float().numpy()

    def layers(self, ids: list[int]) -> list[np.ndarray]:
        """What goes into the first layer, then what comes out of each."""
        return [h[0].float().numpy() for h in self._run(ids, output_hidden_states=True).hidden_states]

    def _run(self, ids: list[int], **options: Any) -> Any:
        try:
            with self.torch.no_grad():
                return self.model(self.torch.tensor([ids]), use_cache=False, **options)
        except Exception as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> UnsupportedError:
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        fix = "this says nothing about the spec: verify a model that transformers can load and run"
        return UnsupportedError(f"transformers itself failed: {text}", where=str(self.path), fix=fix)


def _first_departure(llm: LLM, oracle: _Oracle, ids: list[int]) -> str:
    """The first of: what enters the layers, each layer's output, what comes after; in the tensors' own names."""
    graph = llm.model.graph
    names = _checkpoints(graph)
    theirs = oracle.layers(ids)
    if len(theirs) != len(names) or not names:
        return "(the layers cannot be compared one by one)"
    ours = llm.forward(ids, names)
    # the last hidden state that transformers gives is usually the normalised one: what comes after it is told apart by logits
    for name, want in list(zip(names, theirs, strict=True))[:-1]:
        got = ours[name].reshape(len(ids), -1)
        if got.shape != want.shape:
            return f"{name} has {got.shape[1]} channels here, {want.shape[1]} there"
        difference = float(np.abs(got - want).max())
        if difference > DEPARTS * max(float(np.abs(want).max()), 1e-6):
            return f"{name} (differs by {difference:.2g} of {np.abs(want).max():.2g}); all before it agrees"
    return f"after {names[-2]}: in the last layer, the last norm or the head"


def _checkpoints(graph: Graph) -> list[str]:
    """The names of what enters the first layer, and of each layer's output."""
    outputs = [n for n in graph.names if n.count(".") == 1 and n.split(".")[1].isdigit()]
    if not outputs:
        return []
    stack = outputs[0].split(".")[0]
    for node in graph.nodes:
        if node.scope.split(".")[:2] == [stack, "0"]:
            entry = graph.values[node.inputs[0]].name
            return [entry, *outputs] if entry in graph.names else []
    return []
