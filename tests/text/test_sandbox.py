"""Hostile chat templates: none makes large values, runs long, or reaches anything outside its sandbox."""

from __future__ import annotations

import sys
import time

import pytest

from inferflow.errors import TextError
from inferflow.text import ChatTemplate

USER = [{"role": "user", "content": "hi"}]

BOMBS = {
    "multiply": "{{ 'a' * 10**9 }}",
    "multiply_reversed": "{{ 10**9 * 'a' }}",
    "multiply_list": "{{ [1] * 10**9 }}",
    "multiply_nested": "{{ [messages] * 5000000 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "power_steps": "{% set ns = namespace(x=10**1000) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent_many": "{{ ('%9999d' * 100000) % ([1] * 100000) }}",
    "percent_star": "{{ '%*d' % (1000000000, 1) }}",
    "percent_named": "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format_nested": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format_many": "{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "format_filter": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "center_kwarg": "{{ 'a' | center(width=10**9) }}",
    "indent": "{{ ('a\\n' * 100000) | indent(10**6) }}",
    "indent_text": "{{ ('a\\n' * 100000) | indent('x' * 1000000) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ ('\\t' * 1000).expandtabs(10**8) }}",
    "replace_method": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace_filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "replace_empty": "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
    "join_method": "{{ ('a' * 1000000).join('b' * 1000000) }}",
    "join_filter": "{{ range(99999) | join('a' * 1000000) }}",
    "join_items": "{{ ['a' * 1000000] * 100000 | join }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "encode": "{{ 'a'.encode().ljust(10**9) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "round": "{{ 1 | round(10**9) }}",
    "sum_lists": "{{ ([[1, 2, 3]] * 300000) | sum(start=[]) | length }}",
    "tojson_indent": "{{ [[[1]]] | tojson(indent=10**8) }}",
    "range": "{{ range(10**9) | list }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "tilde": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "plus": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "plus_list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "literal": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "literal_dict": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}",
    "literal_tuple": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "dict_call": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "varargs": (
        "{% set ns = namespace(x=1) %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
        "{% for i in range(60) %}{{ m(ns.x, ns.x) }}{% endfor %}{{ ns.x }}"
    ),
    "namespaces": (
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = [namespace(a=ns.x, b=ns.x), ns.x, ns.x] %}"
        "{% endfor %}{{ ns.x }}"
    ),
    "block_set": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}"
    ),
    "macro_text": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}x{% endmacro %}{{ m(60) }}",
    "macro_endless": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "self_block": "{% block b %}{{ self.b() }}{% endblock %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "memory": (
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [('x' * 4000000)[i:]] %}{% endfor %}"
    ),
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops_silent": (
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% if a %}{% endif %}{% endfor %}"
        "{% endfor %}{% endfor %}"
    ),
    "loop_recursive": "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "filters": "{% for a in range(99999) %}{{ (range(99999) | list | sort | length) and '' }}{% endfor %}",
    "maps": "{% for a in range(99999) %}{{ (range(99999) | map('string') | map('upper') | list)[:0] }}{% endfor %}",
    "compare": "{% for a in range(99999) %}{% for b in range(99999) if a == b %}{% endfor %}{% endfor %}",
    "strftime": "{{ strftime_now('%Y' * 100000) }}",
}

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.mro() }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ ('{0.__class__}' | attr('format'))(messages) }}",
    "{{ ['{0.__class__}'] | map('format', 1) | list }}{{ '{0.__class__.__mro__}'.format_map({'0': 1}) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{% include 'x' %}",
    "{% import 'x' as x %}",
    "{% from 'x' import y %}",
    "{% extends 'x' %}",
    "{% if false %}{% include 'x' %}{% endif %}",
]

BROKEN = [
    "{{",
    "{% for %}",
    "{% endif %}",
    "{{ 1 / 0 }}",
    "{{ none + 1 }}",
    "{{ x.y.z }}",
    "{{ 'a' | nosuch }}",
    "{% nosuch %}",
]
DEEP = [
    "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "{{ 1" + "+1" * 30_000 + " }}",
]


def peak_memory() -> int:
    """The process's peak in bytes, where the system says so in a known unit."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_bombs_are_refused_soon_and_small(name: str) -> None:
    started, before = time.thread_time(), peak_memory()
    with pytest.raises(TextError) as refused:
        ChatTemplate(BOMBS[name], seconds=0.1).render(USER)
    assert refused.value.where == "chat template"
    assert time.thread_time() - started < 3
    assert peak_memory() - before < 400 << 20


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_outside_is_reached(source: str) -> None:
    try:
        text = ChatTemplate(source).render(USER)
    except TextError:
        return
    assert "class" not in text
    assert "function" not in text


@pytest.mark.parametrize("source", [*BROKEN, *DEEP])
def test_broken_templates_are_one_sentence(source: str) -> None:
    with pytest.raises(TextError, match=r"(?s)^.{1,400}$"):
        ChatTemplate(source).render(USER)


def test_a_long_template_is_refused() -> None:
    with pytest.raises(TextError, match="longer"):
        ChatTemplate(" " * 200_000)


def test_ordinary_work_on_a_long_chat_is_within_the_limits() -> None:
    source = (
        "{% macro show(m, all) %}{{ m.role ~ ': ' + m.content | trim | replace('x', 'y') }}{{ m.content.split('q')[-1] }}"
        "{% endmacro %}{% for m in messages[1:] %}{{ show(m, messages) }}{{ '%s %s' % (m.role, m.content) }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word x " * 300}] * 200
    assert len(ChatTemplate(source).render(messages)) > 3 * 300 * 7 * 199


def test_templates_are_safe_to_share_between_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    template = ChatTemplate("{% for m in messages %}{{ m.content ~ loop.index }}{% endfor %}")
    chats = [[{"role": "user", "content": f"c{n}"}] * 50 for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(template.render, chats))
    assert texts == ["".join(f"c{n}{index}" for index in range(1, 51)) for n in range(40)]
