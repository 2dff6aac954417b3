"""What each layer already knows: the logit lens, in a few lines over named tensors.

    python examples/logit_lens.py "The capital of France is" [MODEL]

Every layer's output goes through the model's last norm and head, as if it were the last layer's.
"""

from __future__ import annotations

import sys

import numpy as np

from inferflow import LLM
from inferflow.kernels import reference


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "The capital of France is"
    with LLM(sys.argv[2] if len(sys.argv) > 2 else None) as llm:
        assert llm.tokenizer is not None
        graph, weights = llm.model.graph, llm.model.weights
        layers = [f"layers.{n}" for n in range(graph.layers)]
        hidden = llm.forward(llm.encode(prompt), capture=layers)
        norm = next(node for node in graph.nodes if node.scope == "" and node.op == "norm")
        head, scale = weights.array("output.weight"), weights.array("output_norm.weight")
        for name in layers:
            x = reference.norm(hidden[name][-1:], scale, None, norm.params)
            logits = reference.linear(x, head, None)[0]
            best = np.argsort(-logits)[:3]
            print(f"{name:<10}", "  ".join(f"{logits[i]:6.1f} {llm.tokenizer.decode([i])!r}" for i in best))


if __name__ == "__main__":
    main()
