# ruff: noqa: E501 - one text a line
"""Texts that tokenizers get wrong. `TEXTS` are bytes: not all of them are UTF-8."""

from __future__ import annotations

_WRITTEN: list[str] = [
    "",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "  two  spaces   three    four     five",
    "\t\ttabs\tand\t \t mixed \t",
    "\n",
    "\n\n\n\n",
    "line\nline\r\nline\rline\n\n  indented\n\n\n",
    " \n \n\n \r\n \t\n",
    "a\u00a0b\u00a0\u00a0c \u2003em \u3000ideographic\u2028ls\u2029ps\u0085nel",
    "zero\u200bwidth\u200cnon\u200djoiner\ufeffbom\u2060wj",
    "nul\x00char\x01\x02\x7f\x1b[31m",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd \U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 1\ufe0f\u20e3 \u263a\ufe0f \U0001fae0",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u3053\u3093\u306b\u3061\u306f\u30ab\u30bf\u30ab\u30ca \ud55c\uad6d\uc5b4 \u6f22\u5b57\u304b\u306a",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01 \u0e01\u0e33",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u0661\u0662\u0663 \u0651\u064e",
    "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u09b9\u09cd\u09af\u09be\u09b2\u09cb",
    "e\u0301 a\u0308\u0323 n\u0303 Z\u0351\u036b\u0343\u036aA\u030a caf\u00e9 na\u00efve \u1e9e\u00df \u0130\u0131",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0394\u03b5\u03bb\u03c4\u03b1 \u0540\u0561\u0575 \u10d2\u10d0\u10db \u1230\u120b\u121d",
    "0 1 12 123 1234 12345 1234567890123 3.14159 1,000,000 1e-9 0xFF \u0664\u0665 \u00bd \u2168 \u00b2\u2083 \uff11\uff12",
    "I'm you're he'll they've it's don't I'd 'tis o'clock '''quoted'''",
    "I'M YOU'RE HE'LL THEY'VE IT'S DON'T I'D \u2019s \u2019ll 'S'T'RE",
    "CamelCaseHTTPServer snake_case kebab-case SHOUTING mIxEd iPhone15Pro",
    "!?.,;:()[]{}<>@#$%^&*-+=~`|\\/\"'_ ... --- !!! ??? ===> <!-- --> //",
    "def f(x: int) -> str:\n    \"\"\"Doc.\"\"\"\n\treturn f'{x!r}'  # \u00e9\n\n\nclass A:\n    pass\n",
    "for(int i=0;i<n;++i){a[i]+=b[i]*c[i];}\r\n#include <stdio.h>\r\n",
    "https://example.org/a/b?c=d&e=f#g user@example.com /usr/local/bin C:\\Users\\x",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n- [ ] todo\n  * sub\n1. x\n> q\n```py\nx\n```",
    "<html><body class=\"a\">&nbsp;&amp;</body></html> <br/> <h1>x</h1> </table> >\u2581</ x",
    "$\\frac{a}{b}$ \u2211\u222b\u2202 \u2264 \u2260 \u2192 \u20ac\u00a3\u00a5 \u00a9\u00ae\u2122 \u2014 \u2013 \u201cq\u201d \u00abg\u00bb",
    "\u2581\u2581lower\u2581block \u0120\u010a byte alphabet \u00c2\u00a0 <0x0A> <0xE2><0x96>",
    "pneumonoultramicroscopicsilicovolcanoconiosis Donaudampfschiffahrtsgesellschaftskapit\u00e4n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<s>[INST] hi [/INST] </s><bos><eos><pad><unk><mask><unused7> <|endoftext|><|endoftext|>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n<|eot_id|> <|im_end|<|im_end|>|>",
    "<tool_call>\n{\"name\": \"f\"}\n</tool_call><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|> <repo_name><file_sep>",
    "<bos>", "<|im_end|>", " <|im_end|> ", "a<|endoftext|>", "</s>", "x </s> y",
    "private \ue000\uf8ff\U000f0000\U0010ffff unassigned \u0378\U000e0001 \ufffd \ufffe",
    "\U0001d573\U0001d58a\U0001d591\U0001d591\U0001d594 \uff28\uff45\uff4c\uff4c\uff4f \u24d7\u24d4 \ufb01\ufb02 \u01c5",
    "mixed\u4f60\u597dand\u0645\u0631\u062d\u0628\u0627 1\u5e742\u67083\u65e5 a1b2c3 \u00e91\u00e9 x\u0301y",
    "\u202eright to left\u202c \u200eltr\u200f",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore.",
]  # fmt: skip

_REPEATED: list[str] = [
    "a" * 10_000,
    " " * 10_000,
    "\n" * 3_000,
    "1" * 2_000,
    "\u4f60" * 1_000,
    "ab" * 2_000,
    "=" * 3_000,
]

_NOT_UTF8: list[bytes] = [
    b"\xff", b"\x80abc", b"abc\xc3", b"\xe2\x82", b"a\xf0\x9f\x98b", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80\x80\x80", b"ok \xfe\xff ok",
]  # fmt: skip

TEXTS: list[bytes] = [text.encode() for text in (*_WRITTEN, *_REPEATED)]
NOT_UTF8: list[bytes] = _NOT_UTF8
