"""Chat templates: what they render equals `transformers`; malformed messages are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from inferflow.errors import TextError
from inferflow.text import ChatTemplate, load_tokenizer
from inferflow.weights.open import open_source

from .small import ENGINES
from .templates import CHATML, CONVERSATIONS, TEMPLATES, TOOLS, TURNS

USER = [{"role": "user", "content": "hi"}]


def expected(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers renders, None where it fails."""
    import jinja2
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=ENGINES["byte_level"](), bos_token="<s>", eos_token="</s>")
    try:
        text = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    except (jinja2.TemplateError, TypeError):
        return None
    assert isinstance(text, str)
    return text


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return ChatTemplate(source, bos="<s>", eos="</s>").render(messages, **options)
    except TextError:
        return None


@pytest.mark.parametrize("conversation", sorted(CONVERSATIONS))
@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("with_tools", [False, True])
def test_rendering_equals_transformers(name: str, conversation: str, with_tools: bool) -> None:
    source, messages = TEMPLATES[name], CONVERSATIONS[conversation]
    template = ChatTemplate(source)
    if conversation == "parts" and not template.takes_parts:
        # such templates get one string; transformers would hand them the list and fail or write it out
        messages = [{"role": "user", "content": " a b"}]
    for add_generation_prompt in (False, True):
        options = {"add_generation_prompt": add_generation_prompt, "tools": TOOLS if with_tools else None}
        assert ours(source, messages, **options) == expected(source, messages, **options)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_conversations_do_render(name: str) -> None:
    rendered = [ours(TEMPLATES[name], messages) for messages in CONVERSATIONS.values()]
    assert sum(text is not None for text in rendered) >= 4


@pytest.mark.parametrize("stem", ["smollm2-135m-instruct-q4_1", "qwen2.5-coder-0.5b-instruct-q4_k_m"])
def test_real_templates_equal_transformers(stem: str, request: pytest.FixtureRequest) -> None:
    if stem.startswith("smollm2"):
        path = request.getfixturevalue("smollm2_path")
    else:
        folder = os.environ.get("INFERFLOW_MODELS") or Path.home() / ".cache" / "inferflow-models"
        path = Path(folder) / f"{stem}.gguf"
        if not path.is_file():
            pytest.skip(f"{path} is not there")
    tokenizer = load_tokenizer(open_source(path), path)
    assert tokenizer is not None
    source = tokenizer.chat_template
    assert source is not None
    for name, messages in CONVERSATIONS.items():
        for tools in (None, TOOLS):
            if name != "parts":
                theirs = expected(source, messages, add_generation_prompt=True, tools=tools)
                assert theirs is not None
                assert ChatTemplate.of(tokenizer).render(messages, tools=tools) == theirs


def test_further_variables_reach_the_template() -> None:
    template = ChatTemplate(
        "{{ mood }}{{ nested.a[1] }}{{ bos_token }}{{ eos_token }}{{ pad_token }}", bos="B", tokens={"pad_token": "P"}
    )
    assert template.render(USER, mood="calm", nested={"a": (1, 2)}) == "calm2BP"


def test_time_is_the_present() -> None:
    from datetime import datetime

    before = datetime.now().strftime("%Y")
    text = ChatTemplate("{{ strftime_now('%Y') }}").render(USER)
    assert text in (before, datetime.now().strftime("%Y"))


def test_the_message_of_raise_exception_is_the_error() -> None:
    bad = [{"role": "assistant", "content": "hi"}]
    with pytest.raises(TextError, match="roles must alternate"):
        ChatTemplate(TURNS, bos="<s>").render(bad)


def test_parts_are_joined_unless_the_template_takes_them() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\nab<|im_end|>" in ChatTemplate(CHATML).render(messages)
    assert ChatTemplate("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}").takes_parts is False
    loop = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert ChatTemplate(loop).render(messages) == "[a][b]"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty"),
        ("hi", "not a list"),
        ({"role": "user", "content": "x"}, "not a list"),
        (None, "not a list"),
        ([1], "not a mapping"),
        ([{"content": "x"}], "unknown role None"),
        ([{"role": "wizard", "content": "x"}], "unknown role 'wizard'"),
        ([{"role": ["user"], "content": "x"}], "unknown role"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": None}], "no content"),
        ([{"role": "user", "content": 3}], "int"),
        ([{"role": "user", "content": {"text": "x"}}], "dict"),
        ([{"role": "user", "content": b"x"}], "bytes"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "'image'"),
        ([{"role": "user", "content": ["x"]}], "no text part"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "no text part"),
        ([{"role": "user", "content": "x", "extra": object()}], "holds a object"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, reason: str) -> None:
    with pytest.raises(TextError, match=reason):
        ChatTemplate(CHATML).render(messages)


def test_an_assistant_that_calls_tools_needs_no_content() -> None:
    messages: list[Mapping[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]
    assert ChatTemplate("{{ messages[0].keys() | list }}").render(messages) == "['role', 'tool_calls']"


def test_deeply_nested_values_are_refused() -> None:
    value: Any = "x"
    for _ in range(100):
        value = [value]
    with pytest.raises(TextError, match="nested"):
        ChatTemplate(CHATML).render(USER, tools=value)


def test_a_model_without_a_template() -> None:
    class Bare:
        chat_template = None

    with pytest.raises(TextError, match="no chat template"):
        ChatTemplate.of(Bare())  # type: ignore[arg-type]
