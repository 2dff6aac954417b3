"""The tables of model_specs/README.md, from the catalogue and blocks.toml.

``python -m tests.spec.readme_tables`` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from inferflow.graph.flow_evaluator import OF_TENSORS, REDUCE
from inferflow.graph.primitives import PRIMITIVES, UNARY
from inferflow.spec.document import Table, parse_toml
from inferflow.spec.expression import FUNCTIONS
from inferflow.spec.signature import ACTIVATIONS, Parameter, parse_signature

FOLDER = Path(__file__).parents[2] / "model_specs"
README = FOLDER / "README.md"
HIDDEN = ("act", "binary", "reduce", "select")  # written as x + y, sum(x), silu(x), or not at all


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def shown(parameter: Parameter) -> str:
    kind = " | ".join(parameter.choices) if parameter.choices and parameter.type != "act" else parameter.type
    return f"{kind} = {parameter.default_text}" if parameter.default_text else kind


def primitives() -> Iterator[str]:
    yield "| primitive | gives | parameters |"
    yield "|---|---|---|"
    for name, primitive in PRIMITIVES.items():
        if name not in HIDDEN:
            params = ", ".join(f"`{word}` ({cell(shown(p))})" for word, p in primitive.signature.items())
            yield f"| `{name}` | {cell(primitive.doc)} | {params or '—'} |"


def activations() -> Iterator[str]:
    yield "| function | names |"
    yield "|---|---|"
    for kind in dict.fromkeys(ACTIVATIONS.values()):
        yield f"| `{kind}` | {', '.join(f'`{name}`' for name, value in ACTIVATIONS.items() if value == kind)} |"


def blocks() -> Iterator[str]:
    text = (FOLDER / "blocks.toml").read_text("utf-8")
    for name, block in parse_toml(text, "blocks.toml").table("block").items():
        assert isinstance(block, Table)
        head = re.search(rf"^\[block\.{name}\.params\]\s*#\s*(.*)$", text, re.MULTILINE)
        section = text[text.index(f"[block.{name}.params]") :].split("\n[", 1)[0]
        notes = dict(re.findall(r'^(\w+)\s*=\s*"[^"]*"\s*#\s*(.*)$', section, re.MULTILINE))
        roles = ", ".join(f"`{part}`" for part in block.table("parts"))
        yield f"**`{name}`**: {head[1] if head else ''}." + (f" Roles: {roles}." if roles else "")
        yield ""
        yield "| parameter | type | |"
        yield "|---|---|---|"
        for word, parameter in parse_signature(block.table("params")).items():
            yield f"| `{word}` | {cell(shown(parameter))} | {cell(notes.get(word, ''))} |"
        yield ""


def functions() -> Iterator[str]:
    """All that a flow can call with tensors; each name is in one row."""
    yield "| called with | names |"
    yield "|---|---|"
    rows = {
        "one tensor, number by number": [name for name in UNARY if name != "identity"],
        "one tensor, over the last axis": REDUCE,
        "two tensors, or a tensor and a number": ("min", "max"),
        "tensors and parameters (§10)": [name for name in OF_TENSORS if name in PRIMITIVES],
    }
    assert {name for names in rows.values() for name in names} | {"identity"} == set(OF_TENSORS)
    for what, names in rows.items():
        yield f"| {what} | {', '.join(f'`{name}`' for name in names)} |"
    numbers = [name for name in FUNCTIONS if name not in OF_TENSORS and name != "default"]
    yield f"| numbers only (§2) | {', '.join(f'`{name}`' for name in numbers)}, `has` |"
    yield "| anything: the first that is not None | `default` |"


TABLES = {"functions": functions, "primitives": primitives, "activations": activations, "blocks": blocks}


def filled(text: str) -> str:
    """The README's text with its tables as they are now."""
    for name, make in TABLES.items():
        body = "\n".join(make()).rstrip()
        pattern = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, body=body: f"{m[1]}\n{body}\n\n{m[2]}", text, flags=re.DOTALL)
        assert count == 1
    return text


if __name__ == "__main__":
    README.write_text(filled(README.read_text("utf-8")), "utf-8")
