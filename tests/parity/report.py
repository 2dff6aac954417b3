"""The figures of the parity table, a line a row and both engines: ``python -m tests.parity.report [WORD …]`` (rows whose name
holds a WORD)."""

from __future__ import annotations

import sys

import numpy as np

from inferflow import LLM
from inferflow.arguments import ENGINES

from .oracle import oracle
from .table import ROWS


def main() -> None:
    """Greatest difference of a logit from transformers', whole and in sevens, and the greatest logit."""
    worst: dict[str, list[float]] = {}
    for row in ROWS:
        if sys.argv[1:] and not any(word in row.name for word in sys.argv[1:]):
            continue
        folder, ids, want = oracle(row)
        found = []
        for engine in ENGINES:
            with LLM(folder, engine=engine) as llm:
                found.append(max(float(np.abs(llm.logits(ids, chunk=chunk) - want).max()) for chunk in (None, 1, 7)))
        worst[row.model_type] = [max(pair) for pair in zip(worst.get(row.model_type, found), found, strict=True)]
        print(
            f"{row.name:<40} {' '.join(f'{d:.1e}' for d in found)}  of logits to {np.abs(want).max():.1f}", flush=True
        )
    print(f"\n{len(worst)} model types; the worst of each ({', '.join(ENGINES)}):")
    for name, pair in sorted(worst.items()):
        print(f"  {name:<24} {' '.join(f'{d:.1e}' for d in pair)}")


if __name__ == "__main__":
    main()
