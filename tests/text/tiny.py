"""Small GGUF vocabularies, as metadata: of byte-level BPE (for every pre-tokenizer), SentencePiece and unigram."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from .small import CORPUS

USER_SYMBOLS = ["<tool_call>", "\u2581\u2581two"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_bpe(pre: str) -> dict[str, Any]:
    """A vocabulary whose merges know no words: where a pre-tokenizer cuts shows in the ids."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2_000,
        special_tokens=["<|begin|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=12,
        show_progress=False,
    )
    engine.train_from_iterator(CORPUS, trainer)
    model = json.loads(engine.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda text: int(model["vocab"][text]))
    types = [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2)
    tokens += ["<tool_call>\n", "  two", "<|unused|>"]
    types += [USER_DEFINED, USER_DEFINED, UNUSED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def trained(folder: Path, kind: str, **options: Any) -> list[tuple[str, float]]:
    """Pieces and scores of a model that the `sentencepiece` library trains."""
    import sentencepiece

    prefix = str(folder / kind)
    lines = [line for text in CORPUS for line in text.splitlines() if line.strip() and "\x00" not in line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=prefix, model_type=kind, character_coverage=0.98,
        hard_vocab_limit=False, minloglevel=3, num_threads=1, **options,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]


def from_pieces(pieces: list[tuple[str, float]], model: str, **keys: Any) -> dict[str, Any]:
    def kind(at: int, text: str) -> int:
        if at < 3:
            return UNKNOWN if at == 0 else CONTROL
        return BYTE if text.startswith("<0x") else USER_DEFINED if text in USER_SYMBOLS else NORMAL

    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [text for text, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.token_type": [kind(at, text) for at, (text, _) in enumerate(pieces)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def write(metadata: dict[str, Any], path: Path) -> Path:
    """A GGUF file of the vocabulary alone."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
