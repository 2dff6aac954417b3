"""Writes tests/text/golden/*.json: what the GGUF reference makes of the hostile texts.

    python -m tests.text.make_golden MODEL.gguf …        (needs `pip install xllamacpp`, see reference.py)
    python -m tests.text.make_golden tiny                (the small vocabularies of tiny.py)

A model's file holds, by text, ids with control tokens parsed and not, and pieces and end marks of a sample of tokens. Long ids
are kept as a hash. Where the reference aborts (it does on some bytes that are not UTF-8) the ids are null.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

from inferflow.text import tables

from . import tiny
from .hostile import NOT_UTF8, TEXTS
from .reference import VERSION, ReferenceTokenizer

GOLDEN = Path(__file__).parent / "golden"


def compact(ids: list[int]) -> Any:
    """The ids, or count and hash where they are many."""
    if len(ids) <= 400:
        return ids
    return {"count": len(ids), "sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest()}


def _encode_into(queue: Any, tokenizer: ReferenceTokenizer, text: bytes, parse_special: bool) -> None:
    queue.put(tokenizer.encode(text, add_special=True, parse_special=parse_special))


def encode(tokenizer: ReferenceTokenizer, text: bytes, parse_special: bool) -> Any:
    if text in TEXTS:
        return compact(tokenizer.encode(text, add_special=True, parse_special=parse_special))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_encode_into, args=(queue, tokenizer, text, parse_special))
    child.start()
    child.join()
    return queue.get() if child.exitcode == 0 else None


def golden(tokenizer: ReferenceTokenizer, sample: range) -> dict[str, Any]:
    return {
        "reference": f"xllamacpp {VERSION}",
        "texts": [
            {
                "text": text.hex(),
                "plain": encode(tokenizer, text, False),
                "special": encode(tokenizer, text, True),
            }
            for text in [*TEXTS, *NOT_UTF8]
        ],
        "pieces": {str(token): tokenizer.piece(token).hex() for token in sample},
        "ends": [token for token in range(sample.stop) if tokenizer.is_end(token)],
    }


def digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]


def _digests(metadata: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    tokenizer = ReferenceTokenizer(tiny.write(metadata, folder / "tiny.gguf"))
    return {
        name: [digest(tokenizer.encode(text, add_special=True, parse_special=parsed)) for text in TEXTS]
        for name, parsed in (("plain", False), ("special", True))
    }


def make_tiny() -> None:
    """golden/tiny.json: vocabularies as metadata, and for each a digest of the ids of every text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bpe = tiny.byte_bpe("default")
        pres = tables.pretokenizer_names()
        bpe_ids = {pre: _digests({**bpe, "tokenizer.ggml.pre": pre}, folder) for pre in pres}
        merged = tiny.trained(folder, "bpe", vocab_size=900, byte_fallback=True, user_defined_symbols=tiny.USER_SYMBOLS)
        unigram = tiny.trained(folder, "unigram", vocab_size=600, user_defined_symbols=tiny.USER_SYMBOLS[:1])
        vocabularies = {
            f"{model}{' with a space' if space else ''}": tiny.from_pieces(pieces, model, add_space_prefix=space)
            for model, pieces in (("llama", merged), ("t5", unigram))
            for space in (False, True)
        }
        others = {name: {"metadata": data, **_digests(data, folder)} for name, data in vocabularies.items()}
    data = {"reference": f"xllamacpp {VERSION}", "bpe": {"metadata": bpe, "ids": bpe_ids}, "others": others}
    (GOLDEN / "tiny.json").write_text(json.dumps(data, separators=(",", ":")) + "\n")


def main(paths: list[str]) -> None:
    for name in paths:
        if name == "tiny":
            make_tiny()
            continue
        path = Path(name)
        tokenizer = ReferenceTokenizer(path)
        data = golden(tokenizer, range(0, tokenizer.size, 997))
        (GOLDEN / f"{path.stem}.json").write_text(json.dumps(data, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
