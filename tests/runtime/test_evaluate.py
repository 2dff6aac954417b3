"""Windows, perplexity and divergence against plain formulas; saved logits that are whole, or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from inferflow.errors import ArgumentError, CheckpointError, InferflowError
from inferflow.runtime.evaluate import Scores, cut, scored
from inferflow.runtime.saved_logits import SavedLogits, writing_logits

RNG = np.random.default_rng(5)
VOCAB, CTX = 97, 53
WINDOWS = RNG.integers(0, VOCAB, (3, CTX)).astype(np.int32)
COUNT = CTX - 1 - CTX // 2
BASE = RNG.normal(0, 4, (3, COUNT, VOCAB)).astype(np.float32)
OTHER = BASE + RNG.normal(0, 1, BASE.shape).astype(np.float32)


def log_probabilities(row: np.ndarray) -> list[float]:
    total = math.fsum(math.exp(x) for x in row.tolist())
    return [x - math.log(total) for x in row.tolist()]


def test_windows_do_not_overlap_and_begin_with_the_prefix() -> None:
    windows = cut([1, *range(10, 36)], [1], 8)
    assert windows.tolist() == [
        [1, 10, 11, 12, 13, 14, 15, 16],
        [1, 18, 19, 20, 21, 22, 23, 24],
        [1, 26, 27, 28, 29, 30, 31, 32],
    ]
    assert cut(list(range(27)), [], 8, limit=2).tolist() == [list(range(8)), list(range(8, 16))]
    assert [scored(n).indices(n)[:2] for n in (4, 8, 9, 512)] == [(2, 3), (4, 7), (4, 8), (256, 511)]


@pytest.mark.parametrize(("ids", "prefix", "ctx"), [([1] * 7, [1], 8), ([1] * 9, [1], 3), ([1] * 9, [1] * 3, 4)])
def test_texts_without_a_window_are_refused(ids: list[int], prefix: list[int], ctx: int) -> None:
    with pytest.raises(ArgumentError, match=r"text: |ctx: "):
        cut(ids, prefix, ctx)


def test_only_what_can_help_is_advised() -> None:
    with pytest.raises(ArgumentError) as refused:
        cut([1] * 7, [1], 8, text="FILE", width="--ctx")
    assert (
        str(refused.value)
        == "FILE: it has 7 tokens, fewer than one window of 8 (give a longer text, or lower --ctx to 7)"
    )
    for ids, width in (([], "--ctx"), ([1] * 3, "--ctx"), ([1] * 7, "")):
        with pytest.raises(ArgumentError) as refused:
            cut(ids, [1], 8, width=width)
        assert refused.value.fix == "give a longer text"


def test_scores_equal_the_formulas() -> None:
    scores = Scores()
    nll, base_nll, kld, same = [], [], [], []
    for window, logits, base in zip(WINDOWS, OTHER, BASE, strict=True):
        scores.add(window, logits, base)
        for n, (row, base_row) in enumerate(zip(logits, base, strict=True)):
            q, p = log_probabilities(row), log_probabilities(base_row)
            target = int(window[CTX // 2 + n + 1])
            nll.append(-q[target])
            base_nll.append(-p[target])
            kld.append(math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
            same.append(q.index(max(q)) == p.index(max(p)))
    report = scores.report()
    assert report["scored"] == len(nll) == 3 * COUNT
    np.testing.assert_allclose(np.concatenate(scores.kld), kld, atol=2e-7)
    mean = math.fsum(nll) / len(nll)
    spread = math.sqrt((math.fsum(x * x for x in nll) / len(nll) - mean * mean) / (len(nll) - 1))
    assert report["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)
    assert report["perplexity_error"] == pytest.approx(math.exp(mean) * spread, rel=1e-5)
    assert report["base_perplexity"] == pytest.approx(math.exp(math.fsum(base_nll) / len(nll)), rel=1e-6)
    assert report["kld"] == pytest.approx(math.fsum(kld) / len(kld), rel=1e-6)
    assert report["kld_max"] == pytest.approx(max(kld), rel=1e-6)
    assert 0 < report["same_top"] == sum(same) / len(same) < 1
    assert sorted(kld)[-2] < report["kld_p99_9"] < report["kld_max"]


def test_a_model_is_no_distance_from_itself() -> None:
    scores = Scores()
    scores.add(WINDOWS[0], OTHER[0], OTHER[0].copy())
    report = scores.report()
    assert (report["kld"], report["kld_max"], report["same_top"]) == (0.0, 0.0, 1.0)
    assert report["perplexity"] == report["base_perplexity"]


def test_great_logits_do_not_overflow() -> None:
    scores = Scores()
    scores.add(WINDOWS[0], OTHER[0] * np.float32(1e4), BASE[0] * np.float32(1e4))
    scores.add(WINDOWS[0], OTHER[0] + np.float32(2000), OTHER[0])
    np.testing.assert_allclose(np.concatenate(scores.kld[-2:]), 0, atol=1e-3)
    assert np.isfinite(np.concatenate(scores.kld)).all()
    assert scores.report()["perplexity"] == math.inf


def test_absurd_logits_are_compared_by_what_they_say() -> None:
    scores, flat = Scores(), np.full_like(BASE[0], 3e38)
    scores.add(WINDOWS[0], BASE[0], flat)
    scores.add(WINDOWS[0], flat, BASE[0])
    scores.add(WINDOWS[0], np.where(np.arange(VOCAB) < 9, flat, -flat), flat)
    want = Scores()
    want.add(WINDOWS[0], BASE[0], np.zeros_like(flat))
    want.add(WINDOWS[0], np.zeros_like(flat), BASE[0])
    for got, expected in ((scores.kld, want.kld), (scores.base_nll, want.base_nll)):
        np.testing.assert_array_equal(np.concatenate(got[: len(expected)]), np.concatenate(expected))
    assert np.isfinite(np.concatenate(scores.kld)).all()
    assert scores.kld[-1].min() > 1e37


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    broken = BASE[0].copy()
    broken[20, 3] = bad
    with pytest.raises(InferflowError, match="not finite") as refused:
        Scores("model", "base.logits").add(WINDOWS[0], broken)
    assert refused.value.where == "model"
    with pytest.raises(InferflowError, match="not finite") as refused:
        Scores("model", "base.logits").add(WINDOWS[0], OTHER[0], broken)
    assert refused.value.where == "base.logits"


def test_saved_logits_come_back_to_the_bit(tmp_path: Path) -> None:
    path = saved(tmp_path / "base.logits")
    got = SavedLogits(path)
    got.check(WINDOWS, VOCAB)
    got.check(WINDOWS[:2], VOCAB)
    for n in range(3):
        np.testing.assert_array_equal(got.window(n), BASE[n])
    with pytest.raises(ArgumentError, match="the file exists"), writing_logits(path, WINDOWS, VOCAB):
        raise AssertionError
    assert [p.name for p in tmp_path.iterdir()] == ["base.logits"]


def test_nothing_is_left_of_logits_that_were_not_all_saved(tmp_path: Path) -> None:
    def write(logits: np.ndarray) -> None:
        with writing_logits(tmp_path / "x", WINDOWS, VOCAB) as writer:
            writer.add(logits)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(BASE[0])
    with pytest.raises(ValueError, match="is not"):
        write(BASE[0, :3])
    assert list(tmp_path.iterdir()) == []


def test_saving_logits_touches_nothing_else(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "x.part").symlink_to(precious)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    saved(tmp_path / "x")
    assert precious.read_text() == "mine"
    with pytest.raises(ArgumentError, match="the file exists"):
        saved(tmp_path / "gone")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gone", "precious", "x", "x.part"]


def saved(path: Path) -> Path:
    with writing_logits(path, WINDOWS, VOCAB) as writer:
        for logits in BASE:
            writer.add(logits)
    return path


@pytest.mark.parametrize(
    ("windows", "vocab", "words"),
    [
        (WINDOWS[:, :-1], VOCAB, "give --ctx 53"),
        (WINDOWS, VOCAB + 1, "vocabulary"),
        (WINDOWS + 1, VOCAB, "another text"),
        (np.concatenate([WINDOWS, WINDOWS]), VOCAB, "give --windows 3"),
    ],
)
def test_logits_of_something_else_are_refused(tmp_path: Path, windows: np.ndarray, vocab: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        SavedLogits(saved(tmp_path / "base")).check(windows, vocab)


def crafted(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    header, at = {}, 0
    for name, (kind, shape) in tensors.items():
        end = at + math.prod(shape) * 4
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY\x01\x00",
        b"PK\x03\x04" + bytes(100),
        b"\xff" * 64,
        crafted({"tokens": ("I32", [2, 8])}),
        crafted({"tokens": ("I32", [2, 8]), "logits": ("F32", [2, 4, 5])}),
        crafted({"tokens": ("I32", [2, 8]), "logits": ("F32", [3, 3, 5])}),
        crafted({"tokens": ("I32", [2, 8]), "logits": ("I32", [2, 3, 5])}),
        crafted({"tokens": ("I32", [0, 8]), "logits": ("F32", [0, 3, 5])}),
        crafted({"tokens": ("I32", [2, 1]), "logits": ("F32", [2, 0, 5])}),
        crafted({"tokens": ("I32", [2, 8]), "logits": ("F32", [2, 3, 0])}),
        crafted({"tokens": ("I32", [2, 8]), "logits": ("F32", [2, 3, 5]), "more": ("F32", [1])}),
        crafted({"tokens": ("I32", [2, 8]), "logits": ("F32", [2, 3, 5])})[:-1],
        crafted({"tokens": ("I32", [2, 8]), "logits": ("F32", [2, 3, 5])}) + b"0",
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "logits"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        SavedLogits(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)
