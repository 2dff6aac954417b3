"""Chat templates in the manner of well-known ones, and conversations to try them on."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TURNS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""

HEADERS = """\
{{- bos_token }}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

INSTRUCTION = """\
{%- set ns = namespace(is_first=false, system='', depth=0) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% set ns.system = ns.system ~ message['content'] %}{% continue %}{%- endif %}
    {%- if message['role'] == 'user' %}
        {%- set ns.depth = ns.depth + 1 %}
{{ '[INST] ' }}{% if ns.system and not ns.is_first %}{{ ns.system }}

{% set ns.is_first = true %}{% endif %}{{ message.content.strip() }}{{ ' [/INST]' }}
    {%- else %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
        {%- generation %}{{ ' ' ~ content }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

MACROS = """\
{%- macro describe(parameters, level) %}
    {%- for name, value in parameters | dictsort %}
        {{- '  ' * level ~ name ~ ': ' ~ value.type | default('any') | upper }}
        {%- if value.enum %}{{ ' = ' ~ value.enum | join('|') }}{% endif %}
        {%- if value.properties %}{{ '\n' }}{{ describe(value.properties, level + 1) }}{% endif %}
        {{- '' if loop.last else '\n' }}
    {%- endfor %}
{%- endmacro %}
{%- set roles = {'user': 'U', 'assistant': 'A', 'system': 'S', 'tool': 'T'} %}
{%- for tool in tools or [] %}{{ tool.function.name }}({{ describe(tool.function.parameters.properties, 1) }})
{% endfor %}
{%- for m in messages | rejectattr('role', 'equalto', 'system') | list %}
    {%- set who = roles[m.role] %}
    {%- if m.role in ['user', 'assistant'] %}{{ '%s %d:' % (who, loop.index) }}{% else %}{{ who.lower() }}{% endif %}
    {{- "{} {!r}\n".format(m.content[:20], loop.revindex) if m.content else '-\n' }}
    {%- if loop.index > 40 %}{% break %}{% endif %}
{%- endfor %}
{%- filter trim %}  {{ messages | map(attribute='role') | unique | sort | join(', ') }}  {% endfilter %}
{%- set block %}<{{ messages[-1].role }}>{% endset %}{{ block }}{{ range(3) | list | tojson }}{{ namespace(a=1).a }}
"""

TEMPLATES = {"chatml": CHATML, "turns": TURNS, "headers": HEADERS, "instruction": INSTRUCTION, "macros": MACROS}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather \u2014 \"now\" <b>&</b> 'later'.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "\u4eac\u90fd"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "at": {"type": "object", "properties": {"hour": {"type": "integer"}}},
                },
                "required": ["place"],
            },
        },
    }
]

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello"}],
    "blanks": [{"role": "user", "content": "  \n Hello \t\n"}, {"role": "assistant", "content": "\nHi "}],
    "system": [
        {"role": "system", "content": "You are \"terse\" & <b>kind</b>."},
        {"role": "user", "content": "Caf\u00e9 \U0001f600?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %} \\n"},
    ],
    "empty": [{"role": "user", "content": ""}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"place": "K\u00f6ln"}}}],
        },
        {"role": "tool", "content": "{\"t\": 3}"},
    ],
}  # fmt: skip
