"""What a request may ask of the sampler: every bad value is refused with its name, its value and what it must be."""

from __future__ import annotations

import numpy as np
import pytest

from inferflow.errors import ArgumentError
from inferflow.runtime.sampler import SamplingParams

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", NAN), ("temperature", "hot"), ("temperature", True), ("temperature", 1e4),
        ("top_k", -2), ("top_k", 1.5), ("top_p", 0), ("top_p", 1.1), ("min_p", 1), ("min_p", -0.1), ("seed", -1),
        ("seed", 1 << 64), ("max_tokens", 0), ("max_tokens", True), ("stop", [""]), ("stop", [3]), ("stop", 3),
        ("stop", ["x" * 1001]), ("stop", ["x"] * 65),
        ("n", 0), ("n", 1.0), ("min_tokens", -1), ("typical_p", 0), ("typical_p", "x"), ("tfs_z", 2), ("mirostat", 1),
        ("mirostat", 3), ("mirostat_tau", 0), ("mirostat_eta", NAN), ("repetition_penalty", 0), ("repetition_penalty", -1.2),
        ("presence_penalty", 2.1), ("frequency_penalty", -3), ("dry_multiplier", -1), ("dry_base", 0.5),
        ("dry_allowed_length", 0), ("dry_penalty_last_n", -2), ("logprobs", -1), ("logprobs", 1 << 20),
        ("prompt_logprobs", True),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["2"]), ("stop_token_ids", 2), ("logit_bias", {-1: 1}),
        ("logit_bias", {"abc": 1}), ("logit_bias", {3: 1e30}), ("logit_bias", {3: NAN}), ("logit_bias", [3]),
        ("allowed_token_ids", []), ("allowed_token_ids", [1.5]), ("bad_token_ids", [[]]), ("bad_token_ids", [[1], ["x"]]),
        ("bad_token_ids", "word"), ("fsd_alpha", 1.5), ("fsd_k", 0), ("fsd_n", 17), ("fsd_beta", -1), ("fsd_random", 1),
        ("ignore_eos", None), ("regex", ""), ("regex", 3), ("grammar", "x" * (1 << 21)), ("json_schema", [1]),
    ],
)  # fmt: skip
def test_values_out_of_range(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match="it is ") as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.where == name
    assert caught.value.fix.startswith("it must be ")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("params", "where"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"mirostat": 2, "temperature": 1, "top_p": 0.9}, "mirostat"),
        ({"mirostat": 2}, "mirostat"),
        ({"mirostat": 2, "temperature": 1, "fsd_alpha": 0.5}, "mirostat"),
        ({"fsd_random": True, "temperature": 1}, "fsd_random"),
        ({"fsd_random": True, "fsd_alpha": 0.5}, "fsd_random"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": "a", "grammar": "start: /a/"}, "grammar"),
        ({"json_schema": {}, "regex": "a"}, "regex"),
    ],
)
def test_values_that_contradict_each_other(params: dict[str, object], where: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert caught.value.where == where
    assert caught.value.fix


def test_ids_beyond_the_vocabulary() -> None:
    SamplingParams(logit_bias={66: -100}, bad_token_ids=[66, [0, 66]], allowed_token_ids=[66]).check_vocabulary(67)
    for name, value in [
        ("logit_bias", {67: 1}), ("stop_token_ids", [1, 67]), ("allowed_token_ids", [67]), ("bad_token_ids", [[67, 1]]),
        ("bad_token_ids", [67]), ("dry_breaker_ids", [1 << 60]),
    ]:  # fmt: skip
        with pytest.raises(ArgumentError, match="not in the vocabulary") as caught:
            SamplingParams(**{name: value}).check_vocabulary(67)  # type: ignore[arg-type]
        assert (caught.value.where, caught.value.fix) == (name, "ids go to 66")


def test_more_ids_than_there_are() -> None:
    """A step looks through them."""
    for name in ("stop_token_ids", "allowed_token_ids", "dry_breaker_ids"):
        SamplingParams(**{name: [3] * 67}).check_vocabulary(67)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="it has 68 token ids") as caught:
            SamplingParams(**{name: [3] * 68}).check_vocabulary(67)  # type: ignore[arg-type]
        assert caught.value.where == name


def test_zeros_are_values() -> None:
    p = SamplingParams(temperature=0, top_k=0, seed=0, logprobs=0, min_tokens=0, presence_penalty=0)
    assert (p.seed, p.logprobs, p.greedy) == (0, 0, True)
    assert SamplingParams(top_k=-1).top_k == -1
    assert SamplingParams(temperature=5e-324).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_other_spellings_of_a_value() -> None:
    p = SamplingParams(
        stop="x", temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int64(3): np.float32(1)}, stop_token_ids=None,
        bad_token_ids=[3, np.int64(4), [5, 6]], allowed_token_ids=np.arange(3),
    )  # type: ignore[arg-type]  # fmt: skip
    assert (p.stop, p.temperature, p.top_k, p.logit_bias, p.stop_token_ids) == (("x",), 0.5, 3, {3: 1.0}, ())
    assert (p.bad_token_ids, p.allowed_token_ids) == ((3, 4, (5, 6)), (0, 1, 2))
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
