"""Small tokenizers of every kind, trained on the hostile texts, as engines of the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from .hostile import TEXTS

CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
_SHORT = [text.decode() for text in TEXTS if len(text) < 2_000]
# No piece of a real vocabulary holds the text of a control token.
CORPUS = [text for text in _SHORT if not any(control in text for control in CONTROL)]


def byte_level() -> Tokenizer:
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(CORPUS, trainer)
    engine.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return engine


def unigram() -> Tokenizer:
    engine = Tokenizer(models.Unigram())
    engine.normalizer = normalizers.NFKC()
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=CONTROL, unk_token="<unk>", show_progress=False)
    engine.train_from_iterator(CORPUS, trainer)
    _begin(engine)
    return engine


def sentencepiece() -> Tokenizer:
    """SentencePiece's BPE with byte fallback, as converters write it."""
    engine = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=CONTROL + byte_tokens, show_progress=False, max_token_length=12
    )
    engine.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    data = json.loads(engine.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in CONTROL]
    engine = Tokenizer.from_str(json.dumps(data))
    _begin(engine)
    return engine


def wordpiece() -> Tokenizer:
    engine = Tokenizer(models.WordPiece(unk_token="<unk>"))
    engine.normalizer = normalizers.BertNormalizer()
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece(cleanup=False)
    engine.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=600, special_tokens=CONTROL, show_progress=False)
    )
    engine.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, engine.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    return engine


def _begin(engine: Tokenizer) -> None:
    engine.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", engine.token_to_id("<s>"))]
    )


ENGINES: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "unigram": unigram,
    "sentencepiece": sentencepiece,
    "wordpiece": wordpiece,
}


def save(engine: Tokenizer, folder: Path, **config: Any) -> Path:
    """The engine as a model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **config}))
    return folder
