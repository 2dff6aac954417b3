"""Which keys of the config an expression wanted in vain, and which ones may be meant: for messages."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..spec.document import Leaf, Node
from ..spec.expression import Scope, parse_expression

__all__ = ["absent_keys", "explain", "near_key"]

MAX_FOLLOWED = 50
MAX_SHOWN = 3
_SAME = {"n": "num", "dim": "size", "ffn": "intermediate", "ff": "intermediate", "embd": "hidden", "embed": "hidden"}


def absent_keys(node: Node | None, scope: Scope, config: Mapping[str, Any], kind: str = "any") -> tuple[str, str]:
    """(``cfg.a is not in the config``, ``did you mean cfg.b?``) for the value at `node`, which turned out to be None; two
    empty strings when that was not for want of a key. Names are followed to where they are written; `kind` is the type
    of parameter that was wanted."""
    finder = _Finder(config)
    found = list(dict.fromkeys(finder.of_node(node, scope)))[:MAX_SHOWN]
    if not found:
        return "", ""
    keys = f"{', '.join(found[:-1])} and {found[-1]}" if found[1:] else found[0]
    null = all(finder.null.get(key) for key in found)
    reason = f"{keys} {'are' if found[1:] else 'is'} {'null' if null else 'not'} in the config"
    for key in found:
        parent, _, last = key.rpartition(".")
        inner: Any = config
        for word in parent.split(".")[1:]:
            inner = inner.get(word) if isinstance(inner, Mapping) else None
        close = near_key(last, inner, kind, finder.mentioned) if isinstance(inner, Mapping) else ""
        if close:
            return reason, f"did you mean {parent}.{close}?"
    return reason, ""


def explain(error: SpecError, scope: Scope, config: Mapping[str, Any]) -> None:
    """Adds the keys of the config that are absent to an error that says of an expression that it is missing."""
    said = re.search(r"'([^']*)' is missing \(None\)(?!:)", error.reason)
    if said is not None and " in the config" not in error.reason:
        reason, fix = absent_keys(Leaf(said[1]), scope, config, "number")
        error.reason += f": {reason}" if reason and f"'{reason.split(' ')[0]}'" not in error.reason else ""
        error.fix = fix or error.fix


def near_key(
    word: str, config: Mapping[str, Any], kind: str = "any", known: set[str] | frozenset[str] = frozenset()
) -> str:
    """The key most like `word` that has a value of this kind, or empty. Its words count more than its letters:
    ``num_experts`` is nearer to ``n_routed_experts`` than to ``num_experts_per_tok``."""
    best, score = "", 0.0
    mine = _words(word)
    for key, value in config.items():
        if key.startswith("_") or key in known or not _is(value, kind) or len(key) > 80:
            continue
        theirs = _words(key)
        shared = len(mine & theirs) / len(mine | theirs)
        letters = difflib.SequenceMatcher(None, word, key).ratio()
        if (shared >= 0.5 or letters >= 0.8) and shared + letters / 2 > score:
            best, score = key, shared + letters / 2
    return best


def _words(key: str) -> set[str]:
    words = [word.removesuffix("s") for word in re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower().split("_") if word]
    return {_SAME.get(word, word) for word in words}


def _is(value: Any, kind: str) -> bool:
    if value is None:
        return False
    if kind in ("int", "axis"):
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    wanted: dict[str, type] = {"bool": bool, "list": list, "table": Mapping, "act": str}
    return isinstance(value, wanted[kind]) if kind in wanted else True


class _Finder:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.followed: set[str] = set()
        self.mentioned: set[str] = set()
        self.null: dict[str, bool] = {}

    def of_node(self, node: Node | None, scope: Scope) -> list[str]:
        text = node.value if isinstance(node, Leaf) else None
        if not isinstance(text, str) or node is None or len(self.followed) > MAX_FOLLOWED:
            return []
        try:
            return self.of(parse_expression(text, node.where), scope)
        except SpecError:
            return []

    def of(self, tree: ast.AST, scope: Scope) -> list[str]:
        """The keys for want of which `tree` is None. Of ``a or b`` none, when one of the two wants none."""
        if isinstance(tree, ast.Attribute):
            return self.of_path(tree, scope)
        if isinstance(tree, ast.Name):
            return self.of_name(tree.id, scope)
        if isinstance(tree, ast.IfExp):
            return [*self.of(tree.body, scope), *self.of(tree.orelse, scope)]
        parts = [self.of(child, scope) for child in ast.iter_child_nodes(tree)]
        if isinstance(tree, ast.BoolOp):
            parts = [self.of(value, scope) for value in tree.values]
            if isinstance(tree.op, ast.Or) and not all(parts):
                return []
        return [key for part in parts for key in part]

    def of_path(self, tree: ast.Attribute, scope: Scope) -> list[str]:
        words: list[str] = []
        node: ast.AST = tree
        while isinstance(node, ast.Attribute):
            words.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id != "cfg":
            return self.of(node, scope)
        value: Any = self.config
        self.mentioned.add(words[0])
        for n, word in enumerate(words):
            if not isinstance(value, Mapping):
                return []
            if value.get(word) is None:
                key = ".".join(["cfg", *words[: n + 1]])
                self.null[key] = word in value
                return [key]
            value = value[word]
        return []

    def of_name(self, name: str, scope: Scope) -> list[str]:
        written = getattr(scope, "written", None)
        place = written(name) if written is not None and name not in self.followed else None
        if place is None:
            return []
        self.followed.add(name)
        return self.of_node(*place)
