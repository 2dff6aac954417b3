"""Notes: what is worth a look though nothing is wrong, and silence where there is nothing to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferflow.runtime.model import choose_spec
from inferflow.spec.library import find_spec, load_spec
from inferflow.weights.check import check_spec
from inferflow.weights.notes import check_notes, unread_keys
from inferflow.weights.open import open_source

from ..spec.tiny import CONFIG, write_checkpoint


def notes(folder: Path, text: str, config: dict[str, Any] | None = None, **stored: Any) -> list[str]:
    spec = folder / "own.toml"
    spec.write_text('extends = "decoder"\n' + text, "utf-8")
    source = open_source(write_checkpoint(folder / "model", {**CONFIG, **(config or {})}, **stored))
    chosen, read = choose_spec(source, str(spec), source.config)
    assert check_spec(chosen, read, source) == []
    return [note.replace(str(folder), "D") for note in check_notes(chosen, read, source)]


def test_nothing_to_note(tmp_path: Path) -> None:
    assert notes(tmp_path, "") == []


def test_layers_that_are_left_out(tmp_path: Path) -> None:
    assert notes(tmp_path, "[layers]\ncount = 1\n") == [
        "left out: 9 tensors of layers >= 1 ('model.layers.1' …)",
    ]


def test_patterns_that_ignore_nothing(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('extends = "decoder"\n[gguf]\nignore = ["inherited*"]\n', "utf-8")
    text = '[tensors]\nignore = [\n  "vision.*",\n  "visoin.*",\n]\n'
    said = notes(tmp_path, text, **{"vision.a": np.ones(2, np.float32)})
    assert said == ["D/own.toml:5:3: 'visoin.*' of ignore matches no tensor"]


def test_those_of_a_shipped_spec_are_not_told(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "gemma3_text", "head_dim": 2, "layer_types": ["full_attention"] * 2}
    config["tie_word_embeddings"] = True
    stored = {
        f"model.layers.{i}.{name}.weight": np.ones(shape, np.float32)
        for i in range(2)
        for name, shape in (
            *(("self_attn.q_norm", 2), ("self_attn.k_norm", 2)),
            *((f"{place}_feedforward_layernorm", 8) for place in ("pre", "post")),
        )
    }
    source = open_source(write_checkpoint(tmp_path / "model", config, **stored, **{"lm_head.weight": None}))
    spec, read = choose_spec(source, None, source.config)
    assert spec.value("tensors", "ignore")
    assert check_spec(spec, read, source) == []
    assert check_notes(spec, read, source) == []


def test_keys_that_nothing_reads(tmp_path: Path) -> None:
    said = notes(tmp_path, "", {"attn_logit_softcapping": 50.0, "sliding_window": 4096, "router_aux_loss_coef": 0.1})
    assert said == [
        "the config has keys that may change the mathematics and that the spec does not read: "
        "attn_logit_softcapping = 50.0, sliding_window = 4096"
    ]
    assert notes(tmp_path, '[layers.attn]\nwindow = "cfg.sliding_window"\n', {"sliding_window": 4096}) == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"residual_multiplier": 0.22}, ["residual_multiplier"]),
        ({"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}, ["partial_rotary_factor"]),
        ({"alibi": True, "bias": True, "use_cache": True}, ["alibi"]),
        ({"attention_multiplier": 1.0, "logit_scale": None, "clip_qkv": False, "n_experts": 0, "scale": {}}, []),
        ({"sliding_window": 8, "max_window_layers": 3}, ["sliding_window", "max_window_layers"]),
        ({"sliding_window": 8, "max_window_layers": 3, "use_sliding_window": False}, []),
        ({"hidden_act": "silu", "hidden_activation": "silu"}, []),
        ({"hidden_act": "silu", "hidden_activation": "gelu"}, ["hidden_activation"]),
        ({"attention_chunk_size": 8, "chunk_size": 16}, ["attention_chunk_size"]),  # the other is of a scan in pieces
        ({"_scale": 3.0, "scale_init": 3.0, "vision_scale": 3.0, "activation_dropout": 0.1}, []),
    ],
)
def test_which_keys_are_told(config: dict[str, Any], expected: list[str]) -> None:
    assert unread_keys(load_spec("decoder"), config) == expected


# As the hub has them, the keys that matter here. Their own specs read all that is to be read.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    "qwen2": {"max_window_layers": 28, "rms_norm_eps": 1e-6, "sliding_window": 131072, "use_sliding_window": False},
    "mistral": {"sliding_window": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
    "gemma2": {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_size": 4096,
    },
    "deepseek_v3": {
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5, "topk_group": 4, "topk_method": "noaux_tc", "aux_loss_alpha": 0.001,
    },
    "gpt_oss": {"experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 32, "sliding_window": 128},
    "gpt2": {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True},
    "granite": {
        "attention_multiplier": 0.0156, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22
    },
    "olmo": {"clip_qkv": 8.0, "rope_theta": 1e4},
}  # fmt: skip


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_shipped_specs_are_silent(model_type: str) -> None:
    config = {"model_type": model_type, **PUBLISHED[model_type]}
    assert unread_keys(find_spec(config), config) == []
