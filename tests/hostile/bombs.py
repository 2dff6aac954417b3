"""Specs of a few hundred bytes that ask for more time or memory than there is. Run as a script, it loads them all in a
process that may have 600 MB more than it has, and prints one line for each: seconds, and what was said."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

LET = "\n".join(f'a{n + 1} = "a{n} + a{n}"' for n in range(14))
BLOCKS = "\n".join(
    f'[block.b{n}]\nflow = ["x = p(x) + p(x) + p(x) + p(x)"]\n[block.b{n}.parts]\np = {{ block = "b{n + 1}" }}'
    for n in range(8)
)


def model(*lines: str) -> str:
    return f"[model]\nflow = {json.dumps(['x = token_embd(tokens)', *lines, 'logits = output(x)'])}"


def layers(count: int, *lines: str) -> str:
    return f"[layers]\ncount = {count}\nflow = {json.dumps(lines)}"


# name -> (text after ``extends``, part of what is said)
BOMBS: dict[str, tuple[str, str]] = {
    "dotted key": (".".join(["a"] * 5000) + " = 1", "dots"),
    "dotted key of 200 kB": (".".join(["a"] * 100_000) + " = 1", "dots"),
    "dotted header": ("[" + ".".join(["a"] * 5000) + "]", "dots"),
    "dotted key, many lines": (".\\\n".join(["a"] * 5000) + " = 1", "not valid TOML"),
    "inline tables": ("[let]\nx = " + "{a=" * 5000 + "1" + "}" * 5000, "deeply"),
    "lists in lists": ("[let]\nx = " + "[" * 5000 + "]" * 5000, "deeply"),
    "5000 digits": ("[let]\nd = " + "9" * 5000, "not valid TOML"),
    "4000 digits": ("[let]\nd = " + "9" * 4000, "64 bits"),
    "20000 bits": ("[let]\nd = 0x" + "f" * 5000, "64 bits"),
    "many layers": ("[layers]\ncount = 4096", "too much work"),
    "too many layers": ("[layers]\ncount = 1000000000", "1 to 4096 layers"),
    "long flows": (layers(4096, *["x = x * 2"] * 200), "too much work"),
    "long lines": (layers(4096, *["x = x * len([" + ", ".join(["1"] * 150) + "])"] * 20), "too much work"),
    "stacks in stacks": (
        layers(1000, "x = a(x)") + '\n[a]\ncount = 1000\nflow = ["x = b(x)"]\n[b]\ncount = 1000\nflow = ["x = x * 2"]',
        "too much work",
    ),
    "blocks in blocks": (
        BLOCKS + '\n[block.b8]\nflow = ["x = x * 2"]\n' + layers(64, "x = z(x)") + '\n[layers.z]\nblock = "b0"',
        "too much work",
    ),
    "long lists in every layer": (
        f'[let]\na0 = "[i]"\n{LET}\nbig = "{" + ".join(["len(a14 + a14)"] * 20)}"\n' + layers(64, "x = x * big"),
        "too much work",
    ),
    "sums of lists": (f'[let]\na0 = "[[1]]"\n{LET}\nbig = "len(sum(a14))"\n' + layers(64, "x = x * big"), "numbers"),
    "an endless text": (
        "[let]\na0 = \"'" + "x" * 1000 + "'\"\n" + LET + '\nd = "len(a14)"',
        "too long",
    ),
    "products of products": (
        model(*["y = merge(outer(x, x))", *["y = merge(outer(y, x))"] * 12]),
        "elements for each token",
    ),
    "a cache of products": (
        model(
            "y = merge(outer(x, x))", *["y = merge(outer(y, x))"] * 3, "y = heads(y, 1)", "z = sdpa(y, y, y, scale=1)"
        )
        + '\n[tensors]\nignore = ["model.*"]',
        "no memory for a KV cache",
    ),
    "wide values": (model(*[f"x = concat({', '.join('x' * 60)})"] * 12), "an axis is put together"),
    "10**9 experts": (
        '[layers.ffn]\nblock = "moe"\nexperts = 1000000000\nwidth = 48\nact = "silu"\ntop_k = 1000000',
        "elements for each token",
    ),
    "10**9 experts in the file": (
        '[layers.ffn]\nblock = "moe"\nexperts = 60000000\nwidth = 48\nact = "silu"\ntop_k = 1\n[tensors.layers]\n'
        'ffn_gate_exps = "model.layers.{e}.mlp.gate_proj"',
        "has no tensor",
    ),
    "a tensor of 40 axes": ('[z]\nblock = "param"\nshape = [' + "1," * 40 + "]\n" + model("y = z()"), "40 axes"),
    "a tensor of 10**27": (
        '[z]\nblock = "param"\nshape = [1000000000, 1000000000, 1000000000]\n' + model("y = z()"),
        "'z.value' has no tensor",
    ),
    "10**18 heads": (model("x = heads(x, 10 ** 18)"), "cannot be cut"),
    "rotary angles": ("[layers.attn.rope]\ndim = 2000000000", "must be even"),
}


def main() -> None:
    from inferflow.errors import InferflowError
    from inferflow.llm import LLM
    from tests.tiny import write

    folder = Path(tempfile.mkdtemp())
    write(folder / "model")
    LLM(folder / "model").logits([3])
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (600 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name, (text, _) in BOMBS.items():
        file = folder / "bomb.toml"
        file.write_text(f'extends = "llama"\n{text}\n')
        start, said = time.process_time(), "loaded"
        try:
            LLM(folder / "model", file)
        except InferflowError as error:
            said = str(error)
        except BaseException as error:
            said = f"ESCAPED: {type(error).__name__}: {error}"
        print(json.dumps([name, time.process_time() - start, said]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
