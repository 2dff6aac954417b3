"""What transformers' rotary functions give, and the same cases in the words of a `rope` node.

Run as a program it writes the answers of all cases into a file: with ATEN_CPU_CAPABILITY=default torch computes one number at
a time, and its powers are then the correctly rounded ones on every processor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

POSITIONS = (0, 1, 8191, 8192, 100000)
SIZES = (
    (8, 10000.0),
    (10, 11158840.0),
    (64, 500000.0),
    (64, 12e6),
    (80, 34567.891234),
    (96, 1e6),
    (128, 1e6),
    (256, 2e6),
)


@dataclass(frozen=True)
class Case:
    """`kind` is ours, `theirs` the rope_type of transformers; `length` is the sequence's, where that matters."""

    name: str
    kind: str
    theirs: str
    scaling: dict[str, Any] = field(default_factory=dict)
    length: int = 1
    limit: int = 32768


YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 8192}
CASES = (
    Case("default", "default", "default"),
    Case("linear", "linear", "linear", {"factor": 2.7}),
    Case("dynamic-short", "dynamic", "dynamic", {"factor": 2.7}, 4096, 4096),
    Case("dynamic-long", "dynamic", "dynamic", {"factor": 2.7}, 100001, 4096),
    Case("dynamic-next", "dynamic", "dynamic", {"factor": 4.0}, 4097, 4096),
    Case("yarn", "yarn", "yarn", YARN),
    Case("yarn-no-factor", "yarn", "yarn", {**YARN, "factor": None}),
    Case("yarn-betas", "yarn", "yarn", {**YARN, "beta_fast": 16.5, "beta_slow": 2.0}),
    Case("yarn-attention", "yarn", "yarn", {**YARN, "attention_factor": 1.3}),
    Case("yarn-mscale", "yarn", "yarn", {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
    Case("yarn-not-truncated", "yarn", "yarn", {**YARN, "factor": 32.0, "truncate": False}),
    Case("bands", "bands", "llama3",
         {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    Case("bands-32", "bands", "llama3",
         {"factor": 32.0, "low_freq_factor": 1.3, "high_freq_factor": 3.9, "original_max_position_embeddings": 4096}),
    Case("longrope-short", "longrope", "longrope", {"original_max_position_embeddings": 4096}, 4096, 131072),
    Case("longrope-long", "longrope", "longrope", {"original_max_position_embeddings": 4096}, 4097, 131072),
    Case("longrope-factor", "longrope", "longrope",
         {"original_max_position_embeddings": 4096, "attention_factor": 1.19, "factor": 32.0}, 9000, 131072),
    Case("proportional", "proportional", "proportional", {"factor": 8.0, "partial_rotary_factor": 0.25}),
)  # fmt: skip


def scaling_of(case: Case, dim: int) -> dict[str, Any]:
    """The rope_parameters of `case`, with factors a head of `dim` needs."""
    out = dict(case.scaling)
    if case.kind == "longrope":
        noise = np.random.default_rng(dim).uniform(0, 1, dim)
        out["short_factor"] = [float(v) for v in 1 + 0.1 * noise[::2]]
        out["long_factor"] = [float(v) for v in 1 + 60 * noise[1::2] ** 2]
    return out


def theirs(case: Case, dim: int, theta: float) -> tuple[np.ndarray, float, np.ndarray]:
    """(inverse frequencies; factor; cos and sin at POSITIONS, [2, positions, dim / 2]) of transformers."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": case.theirs, "rope_theta": theta, **scaling_of(case, dim)}
    config = LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=case.limit,
        rope_parameters=parameters,
    )
    if case.theirs == "default":
        inverse, factor = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0
    else:
        length: Any = torch.tensor(case.length) if case.kind == "dynamic" else case.length  # as a forward pass gives it
        inverse, factor = ROPE_INIT_FUNCTIONS[case.theirs](config, torch.device("cpu"), seq_len=length)
    angle = torch.tensor(POSITIONS)[:, None].float() * inverse.float()
    table = torch.stack([angle.cos() * factor, angle.sin() * factor])
    return inverse.numpy(), float(factor), table.numpy()


def key(case: Case, dim: int, theta: float) -> str:
    return f"{case.name}-{dim}-{theta:.0f}"


def write(path: str) -> None:
    arrays: dict[str, Any] = {}
    for case in CASES:
        for dim, theta in SIZES:
            inverse, factor, table = theirs(case, dim, theta)
            name = key(case, dim, theta)
            arrays.update({f"{name}.inverse": inverse, f"{name}.factor": factor, f"{name}.table": table})
    np.savez(path, **arrays)


if __name__ == "__main__":
    write(sys.argv[1])
