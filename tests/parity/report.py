"""The figures of the parity table, a line a row: ``python -m tests.parity.report [WORD …]`` (rows whose name holds a WORD)."""

from __future__ import annotations

import sys

import numpy as np

from inferflow.runtime.engine import Engine
from inferflow.runtime.executor import ReferenceExecutor
from inferflow.runtime.model import load_model

from .oracle import oracle
from .table import ROWS


def main() -> None:
    """Greatest difference of a logit from transformers', whole and in sevens, and the greatest logit."""
    worst: dict[str, float] = {}
    for row in ROWS:
        if sys.argv[1:] and not any(word in row.name for word in sys.argv[1:]):
            continue
        folder, ids, want = oracle(row)
        model = load_model(folder)
        engine = Engine(model.graph, ReferenceExecutor(model.graph, model.weights), max_len=len(ids))
        differences = [np.abs(engine.forward(ids, chunk=chunk)["logits"] - want).max() for chunk in (None, 1, 7)]
        worst[row.model_type] = max(worst.get(row.model_type, 0.0), *map(float, differences))
        print(f"{row.name:<40} {max(differences):.1e}  of logits to {np.abs(want).max():.1f}", flush=True)
    print(f"\n{len(worst)} model types; the worst of each:")
    for name, difference in sorted(worst.items()):
        print(f"  {name:<24} {difference:.1e}")


if __name__ == "__main__":
    main()
