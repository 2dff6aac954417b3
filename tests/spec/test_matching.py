"""Every model type and every GGUF architecture is served by exactly one spec."""

from __future__ import annotations

import itertools
import re
import sys
from importlib import resources
from typing import Any

import pytest

from inferflow.errors import SpecError
from inferflow.spec.library import find_spec, list_specs, load_spec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def variants(names: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values."""
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*names.values())]


# For each [match]/[gguf] table, by what it asks in `when`: the configs to try.
ASKED = variants(
    {
        "num_local_experts": [None, 8],
        "scoring_func": [None, "softmax", "sigmoid"],
        "use_bidirectional_attention": [None, True],
    }
)


def claims(section: str, key: str) -> dict[str, set[str]]:
    out: dict[str, set[str]] = {}
    for name in list_specs():
        document = tomllib.loads(resources.files("model_specs").joinpath(f"{name}.toml").read_text("utf-8"))
        names = document.get(section, {}).get(key, [])
        for word in [names] if isinstance(names, str) else names:
            out.setdefault(word, set()).add(name)
    return out


@pytest.mark.parametrize(
    ("section", "key", "ask"), [("match", "model_type", "model_type"), ("gguf", "arch", "gguf_arch")]
)
def test_every_model_has_one_spec(section: str, key: str, ask: str) -> None:
    """Whatever a `when` asks: never two, and each spec is found by something."""
    claimed = claims(section, key)
    assert len(claimed) > 20
    for word, specs in claimed.items():
        found, refused = set(), []
        for more in ASKED:
            try:
                found.add(find_spec({ask: word, **more}).name)
            except SpecError as error:
                refused.append(error.reason)
        assert found == specs, f"{word} is claimed by {specs}, of which {found} were found"
        assert all(reason.startswith("no shipped spec serves") for reason in refused), refused


@pytest.mark.parametrize("name", list_specs())
def test_every_when_is_tried_above(name: str) -> None:
    """A new condition has to be added to `ASKED`, or the test before says nothing about it."""
    spec = load_spec(name)
    for section in ("match", "gguf"):
        asked = set(re.findall(r"cfg\.(\w+)", str(spec.value(section, "when") or "")))
        assert asked <= ASKED[0].keys()


@pytest.mark.parametrize("name", list_specs())
def test_match_and_arch_are_said_in_the_file_itself(name: str) -> None:
    """They are read without what the file extends: an inherited one would serve two specs."""
    document = tomllib.loads(resources.files("model_specs").joinpath(f"{name}.toml").read_text("utf-8"))
    if document.get("gguf", {}).get("when"):
        assert document["gguf"].get("arch")
    assert name == "decoder" or document["match"]["model_type"]
