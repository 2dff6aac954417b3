"""A tiny model with a tokenizer: its vocabulary is 66 words, and BOS, which it puts before a text if asked to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.tiny import CONFIG, tensors, write

BOS = 1
WORDS = [f"w{n}" for n in range(CONFIG["vocab_size"])]
WORDS[BOS] = "<s>"


def words_model(folder: Path, bos: bool = True, seed: int = 0) -> Path:
    """The checkpoint of `tests.tiny` with weights of `seed`, and a tokenizer of words between spaces."""
    write(folder, CONFIG, tensors(CONFIG, seed))
    engine = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="w0"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(["<s>"])
    if bos:
        engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return folder


def words_text(count: int, seed: int = 0) -> str:
    """`count` random words, none of them BOS."""
    return " ".join(WORDS[n] for n in np.random.default_rng(seed).integers(2, len(WORDS), count))
