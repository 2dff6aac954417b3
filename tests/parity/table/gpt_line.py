"""The GPT line and its kin: LayerNorm, learned positions, ALiBi, parallel residuals, fused projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from .row import SMALL, Row, sparse

GPT: dict[str, Any] = {
    "vocab_size": 101,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEO: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_layers": 5,
    "num_heads": 6,
    "attention_types": [[["global", "local"], 2], [["local"], 1]],
    "window_size": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MHA = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
FALCON = {k: v for k, v in MHA.items() if k != "intermediate_size"}
RW = {**FALCON, "alibi": True, "bias": True, "parallel_attn": False, "multi_query": False}
MPT: dict[str, Any] = {"vocab_size": 101, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 128}
BLOOM: dict[str, Any] = {"vocab_size": 101, "hidden_size": 48, "n_layer": 3, "n_head": 6}
OPT = {**FALCON, "ffn_dim": 72}


def linear() -> dict[str, Any]:
    """A new dict each time: config classes write into the one they are given."""
    return {"rope_type": "linear", "factor": 4.0}


def sdpa(model: Any) -> None:
    """The class's eager path adds ALiBi twice: once to the scores and once more with the mask."""
    model.config._attn_implementation = "sdpa"


def learned(model: Any) -> None:
    """What the class leaves out of its authors' code: learned positions in place of ALiBi, and scaled logits."""
    body = model.transformer
    body.wpe = torch.nn.Embedding(body.config.max_seq_len, body.config.d_model)
    body.wte.register_forward_hook(lambda module, args, out: out + body.wpe.weight[: out.shape[1]])
    body.build_mpt_alibi_tensor = lambda heads, length, device: torch.zeros(heads, 1, length, device=device)
    model.lm_head.register_forward_hook(lambda module, args, out: out * model.config.logit_scale)


def as_published(folder: Path) -> None:
    """Sizes only in config.json; tensors without the prefix, and with the masks that were once saved."""
    sparse()(folder)
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): array for name, array in load_file(path).items()}
    masks = {
        f"h.{i}.attn.{kind}": np.ones((1, 1, 8, 8), np.float32) for i in range(3) for kind in ("bias", "masked_bias")
    }
    save_file({**tensors, **masks}, path)


ROWS = [
    Row("gpt2", "gpt2", GPT),
    Row("gpt2-untied-inner", "gpt2", {**GPT, "n_head": 4, "n_inner": 60, "tie_word_embeddings": False, "n_layer": 4}),
    Row("gpt2-inverse-layer", "gpt2", {**GPT, "scale_attn_by_inverse_layer_idx": True, "layer_norm_epsilon": 0.1}),
    Row("gpt2-unscaled", "gpt2", {**GPT, "scale_attn_weights": False, "activation_function": "gelu"}, scale=0.7),
    Row("gpt2-as-published", "gpt2", GPT, rewrite=as_published),
    Row("gpt_bigcode", "gpt_bigcode", GPT),
    Row("gpt_bigcode-sparse", "gpt_bigcode", {**GPT, "n_head": 4}, rewrite=sparse()),
    Row(
        "gpt_bigcode-mha",
        "gpt_bigcode",
        {**GPT, "multi_query": False, "n_inner": 60, "tie_word_embeddings": False, "activation_function": "relu"},
    ),
    Row("gpt_neo", "gpt_neo", NEO, scale=0.7),
    Row("gpt_neo-untied", "gpt_neo", {**NEO, "intermediate_size": 60, "tie_word_embeddings": False}, scale=0.7),
    Row(
        "gpt_neo-sparse",
        "gpt_neo",
        NEO,
        scale=0.7,
        rewrite=sparse(window_size=8, attention_types=NEO["attention_types"]),
    ),
    Row("gpt_neox", "gpt_neox", {**MHA, "rotary_pct": 0.25}),
    Row(
        "gpt_neox-sequential",
        "gpt_neox",
        {**MHA, "use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500},
    ),
    Row(
        "gpt_neox-bare", "gpt_neox", {**MHA, "attention_bias": False, "hidden_act": "gelu_fast", "layer_norm_eps": 0.1}
    ),
    Row(
        "gpt_neox-linear", "gpt_neox", {**MHA, "rope_scaling": linear(), "tie_word_embeddings": True, "rotary_pct": 0.5}
    ),
    Row("gpt_neox-sparse", "gpt_neox", MHA, rewrite=sparse()),
    Row(
        "gpt_neox-before",
        "gpt_neox",
        {**MHA, "rotary_pct": 0.5, "rotary_emb_base": 500},
        rewrite=sparse(rotary_pct=0.5, rotary_emb_base=500, rope_scaling=None),
    ),
    Row("gptj-sparse", "gptj", {**GPT, "rotary_dim": 4}, rewrite=sparse(rotary_dim=4)),
    Row("gptj", "gptj", {**GPT, "rotary_dim": 4}),
    Row(
        "gptj-whole",
        "gptj",
        {**GPT, "n_head": 4, "rotary_dim": 12, "n_inner": 60, "activation_function": "relu", "layer_norm_epsilon": 0.1},
    ),
    Row("falcon-7b", "falcon", FALCON),
    Row(
        "falcon-7b-untied-biases",
        "falcon",
        {**FALCON, "bias": True, "tie_word_embeddings": False, "ffn_hidden_size": 60},
    ),
    Row("falcon-sparse", "falcon", FALCON, rewrite=sparse("hidden_size", n_embed=48)),
    Row(
        "falcon-sparse-40b",
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        rewrite=sparse(new_decoder_architecture=True, num_kv_heads=2),
    ),
    Row("falcon-40b", "falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "rope_theta": 500.0}),
    Row(
        "falcon-11b",
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    Row(
        "falcon-sequential",
        "falcon",
        {
            **FALCON,
            "parallel_attn": False,
            "multi_query": False,
            "rope_scaling": linear(),
            "activation": "relu",
            "layer_norm_epsilon": 0.1,
        },
    ),
    Row("falcon-rw", "falcon", RW, adjust=sdpa),
    Row("falcon-rw-16", "falcon", {**RW, "hidden_size": 64, "num_attention_heads": 16}, prompt=100, adjust=sdpa),
    Row("falcon-alibi-mqa", "falcon", {**FALCON, "alibi": True, "num_attention_heads": 12}, adjust=sdpa),
    Row("mpt", "mpt", {**MPT, "n_heads": 8}),
    Row("mpt-six-heads", "mpt", {**MPT, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.6}}),
    Row("mpt-sparse", "mpt", MPT, rewrite=sparse()),
    Row("mpt-untied", "mpt", {**MPT, "n_heads": 12, "tie_word_embeddings": False, "layer_norm_epsilon": 0.1}),
    Row(
        "mpt-learned-positions",
        "mpt",
        {**MPT, "attn_config": {"alibi": False}, "logit_scale": 0.7},
        adjust=learned,
    ),
    Row("bloom", "bloom", {**BLOOM, "n_head": 8}),
    Row("bloom-twelve-heads", "bloom", {**BLOOM, "n_head": 12, "tie_word_embeddings": False}),
    Row("bloom-sparse", "bloom", BLOOM, rewrite=sparse("hidden_size", "n_head", n_embed=48, num_attention_heads=6)),
    Row(
        "bloom-residual-of-norm",
        "bloom",
        {**BLOOM, "layer_norm_epsilon": 0.1, "apply_residual_connection_post_layernorm": True},
    ),
    Row("opt", "opt", OPT),
    Row("opt-sparse", "opt", OPT, rewrite=sparse()),
    Row("opt-350m", "opt", {**OPT, "word_embed_proj_dim": 20, "do_layer_norm_before": False}),
    Row(
        "opt-bare",
        "opt",
        {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
    Row("opt-untied-no-last-norm", "opt", {**OPT, "tie_word_embeddings": False, "_remove_final_layer_norm": True}),
]
