"""Stop strings against a definition written down plainly, over every way to cut the text into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferflow.errors import ArgumentError
from inferflow.text import StopMatcher


def plainly(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop that is complete first, the longest of those ending there; the text before it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def stream(pieces: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops)
    emitted = [matcher.feed(piece) for piece in pieces]
    emitted.append(matcher.flush())
    return "".join(emitted), matcher.matched, emitted


@given(st.lists(st.text("ab<", max_size=4), max_size=12), st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4))
def test_equals_the_definition_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    text, matched, _ = stream(pieces, stops)
    assert (text, matched) == plainly("".join(pieces), stops)


@given(st.text("ab<", max_size=30), st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=4))
def test_holds_back_no_more_than_could_begin_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for at, character in enumerate(text, start=1):
        emitted += matcher.feed(character)
        if matcher.matched is not None:
            return
        held = text[len(emitted) : at]
        longest = max((n for s in stops for n in range(len(s)) if text[:at].endswith(s[:n])), default=0)
        assert len(held) == longest


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["Hello\n", "\nUser", ": x"], ["\n\nUser:"], "Hello", "\n\nUser:"),
        (["stop here"], ["stop"], "", "stop"),
        (["a", "b", "c", "d"], ["bcd", "bc"], "a", "bc"),
        (["xabc"], ["abc", "bc"], "x", "abc"),
        (["ab", "ab", "ac"], ["ababac"], "", "ababac"),
        (["aaab"], ["aab"], "a", "aab"),
        (["no", "thing"], ["thingy"], "nothing", None),
        (["any"], [], "any", None),
        (["\U0001f600\ufe0f!"], ["\ufe0f!"], "\U0001f600", "\ufe0f!"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], text: str, matched: str | None) -> None:
    assert stream(pieces, stops)[:2] == (text, matched)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("text EN") == "text "
    assert matcher.feed("D more") == ""
    assert matcher.matched == "END"
    assert matcher.feed("even more") == ""
    assert matcher.flush() == ""


def test_text_that_cannot_be_a_stop_is_not_delayed() -> None:
    matcher = StopMatcher(["</s>"])
    assert [matcher.feed(piece) for piece in ["a", "<", "b", "</", "p>"]] == ["a", "", "<b", "", "</p>"]


@pytest.mark.parametrize("stops", ["abc", [""], ["a", ""], [1]])
def test_bad_stops_are_refused(stops: object) -> None:
    with pytest.raises(ArgumentError):
        StopMatcher(stops)  # type: ignore[arg-type]
