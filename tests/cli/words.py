"""A tiny model with a tokenizer: its vocabulary is 66 words, and BOS, which it puts before a text if asked to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from inferflow.llm import LLM
from tests.tiny import CONFIG, tensors, write

BOS = 1
WORDS = [f"w{n}" for n in range(CONFIG["vocab_size"])]
WORDS[BOS] = "<s>"

TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'w60', 'user': 'w61', 'assistant': 'w62'}[m.role] }} {{ m.content }} w63 {% endfor %}"
    "{% if add_generation_prompt %}w62 {% endif %}"
)


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


def chat_model(folder: Path) -> Path:
    """`words_model` with a chat template, and no BOS."""
    words_model(folder, bos=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def answers(model: Path, users: list[str], system: str | None = None, **options: Any) -> list[str]:
    """What the model says to these messages, each in the company of those before it."""
    told = []
    with LLM(model) as llm:
        messages = [{"role": "system", "content": system}] if system is not None else []
        for user in users:
            messages.append({"role": "user", "content": user})
            said = llm.chat(messages, **options).text
            messages.append({"role": "assistant", "content": said})
            told.append(said)
    return told
