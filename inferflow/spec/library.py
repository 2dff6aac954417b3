"""Finding, extending and matching specs: from a name, a file or a config to one merged document.

``extends`` merges tables key by key; lists and values are replaced, and a table may be replaced by a value (``rope = false``
removes a table). Every entry remembers the file it was written in.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecError, did_you_mean
from .document import MAX_BYTES, Leaf, Node, Table, Where, parse_toml
from .expression import evaluate

__all__ = ["Family", "Spec", "families", "find_spec", "for_gguf", "list_specs", "load_spec", "merge", "override"]

MAX_EXTENDS = 8
_IS_SPEC = re.compile(r"^(extends\s*=|\[model\])", re.MULTILINE)  # the package holds tables of other kinds too


@dataclass(frozen=True)
class Spec:
    """One model family: the merged document, the blocks it can call, and the files it came from (own file first)."""

    name: str
    tree: Table
    blocks: Table
    files: tuple[str, ...]

    def value(self, *path: str) -> Any:
        """The plain value at `path`, or None."""
        node: Node | None = self.tree
        for key in path:
            node = node.get(key) if isinstance(node, Table) else None
        return plain(node)


def plain(node: Node | None) -> Any:
    """A node as Python data."""
    if isinstance(node, Table):
        return {k: plain(v) for k, v in node.items()}
    if node is None:
        return None
    return [plain(v) for v in node.value] if isinstance(node.value, list) else node.value


def merge(base: Table, child: Table) -> Table:
    """`child` over `base`."""
    out = dict(base.entries)
    for key, node in child.items():
        old = out.get(key)
        out[key] = merge(old, node) if isinstance(old, Table) and isinstance(node, Table) else node
    return Table(out, child.where)


def override(tree: Table, path: str, node: Node) -> Table:
    """`tree` with the dotted `path` set to `node`."""
    key, _, rest = path.partition(".")
    if rest:
        inner = tree.get(key)
        node = override(inner if isinstance(inner, Table) else Table({}, node.where), rest, node)
    return Table({**tree.entries, key: node}, tree.where)


def for_gguf(spec: Spec) -> Spec:
    """`spec` as it applies to a GGUF file: with ``gguf.set``, what the converter changed, laid over it."""
    tree = spec.tree
    for path, node in tree.table("gguf").table("set").items():
        tree = override(tree, path, node)
    return Spec(spec.name, tree, spec.blocks, spec.files)


def _shipped(name: str) -> Any:
    return importlib.resources.files("model_specs").joinpath(f"{name}.toml")


@functools.lru_cache(maxsize=256)
def _shipped_text(name: str) -> str:
    """The files of an installed package do not change while it runs."""
    text: str = _shipped(name).read_text("utf-8")
    return text


def list_specs() -> list[str]:
    """The names of the shipped specs."""
    return list(_spec_names())


@functools.lru_cache(maxsize=1)
def _spec_names() -> tuple[str, ...]:
    files = importlib.resources.files("model_specs").iterdir()
    names = sorted(f.name[:-5] for f in files if f.name.endswith(".toml"))
    return tuple(name for name in names if _IS_SPEC.search(_shipped_text(name)))


@dataclass(frozen=True)
class Family:
    """What one shipped spec serves."""

    spec: str
    model_types: tuple[str, ...]
    archs: tuple[str, ...]


def families() -> list[Family]:
    """Every shipped spec that serves models, with their ``model_type``s and GGUF architectures."""
    out = []
    for name in list_specs():
        table = parse_toml(_shipped_text(name), f"{name}.toml")
        types, archs = plain(table.table("match").get("model_type")), plain(table.table("gguf").get("arch"))
        family = Family(name, tuple(_words(types)), tuple(_words(archs)))
        if family.model_types or family.archs:
            out.append(family)
    return out


def _words(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def load_spec(name: str | Path) -> Spec:
    """The spec called `name` (shipped), or in the file `name` when it ends in ``.toml``."""
    chain = list(_chain(str(name)))
    tree = Table({}, chain[-1][2].where)
    for _, _, table in reversed(chain):
        tree = merge(tree, table)
    own = {key: node for key, node in tree.items() if key not in ("extends", "block")}
    library = parse_toml(_shipped_text("blocks"), "blocks.toml").table("block")
    blocks = merge(library, tree.table("block"))
    return Spec(chain[0][0], Table(own, tree.where), blocks, tuple(file for _, file, _ in chain))


def _chain(name: str) -> Iterator[tuple[str, str, Table]]:
    """(name, file, document) of `name` and of all it extends, nearest first."""
    seen: list[str] = []
    asked: Where | None = None
    folder: Path | None = None
    while True:
        text, file, path = _read(name, folder, asked)
        if file in seen or len(seen) > MAX_EXTENDS:
            raise SpecError(f"'{name}' extends itself", where=str(asked or file), fix="break the circle of extends")
        seen.append(file)
        folder = path.parent if path else None
        table = parse_toml(text, file)
        yield Path(name).stem, file, table
        base = table.get("extends")
        if base is None:
            return
        if not isinstance(base, Leaf) or not isinstance(base.value, str):
            raise SpecError("'extends' is the name of a spec", where=str(base.where), fix='write extends = "decoder"')
        name, asked = base.value, base.where


def _read(name: str, folder: Path | None, asked: Where | None) -> tuple[str, str, Path | None]:
    """The text of a spec: a file for the user's own, else the shipped one. A base is looked for beside its child first."""
    if asked is None and name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            reason = "it is a folder" if path.is_dir() else "there is no such file"
            raise SpecError(reason, where=name, fix="give the path of a .toml file")
        return _text(path), name, path
    plain_name = name.replace("_", "").replace("-", "").isalnum()
    if plain_name and folder is not None and (folder / f"{name}.toml").is_file():
        path = folder / f"{name}.toml"
        return _text(path), str(path), path
    if not plain_name or name not in list_specs():
        fix = did_you_mean(name, list_specs()) or "'inferflow spec list' shows the shipped specs"
        raise SpecError(f"there is no spec called '{name}'", where=str(asked or name), fix=fix)
    return _shipped_text(name), f"{name}.toml", None


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > 4 * MAX_BYTES:
            raise SpecError("the file is too large for a spec", where=str(path), fix=f"at most {MAX_BYTES} characters")
        data = path.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        place = Where(str(path), before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        raise SpecError(f"not UTF-8 text: {error.reason}", where=str(place), fix="save it as UTF-8") from None
    except OSError as error:
        raise SpecError(str(error.strerror), where=str(path), fix="check its permissions") from None


def find_spec(config: Mapping[str, Any]) -> Spec:
    """The shipped spec whose ``[match]`` (or ``[gguf]``) fits `config`; one with a true ``when`` goes first."""
    gguf = config.get("gguf_arch")
    wanted = gguf or config.get("model_type")
    key, section = ("arch", "gguf") if gguf else ("model_type", "match")
    if not isinstance(wanted, str):
        fix = "add model_type to config.json, or give a spec with --spec"
        raise SpecError("the model's config does not say its model_type", where="config.json", fix=fix)
    known: dict[str, str] = {}
    found: list[tuple[bool, str]] = []
    for name in list_specs():
        text = _shipped_text(name)
        if f"[{section}]" not in text:
            continue
        table = parse_toml(text, f"{name}.toml").table(section) if f'"{wanted}"' in text else None
        if table is None:
            continue
        names = _words(plain(table.get(key)))
        known.update(dict.fromkeys(names, name))
        when = table.get("when")
        if wanted in names:
            if when is None:
                found.append((False, name))
            elif isinstance(when, Leaf) and evaluate(str(when.value), {"cfg": config}, when.where):
                found.append((True, name))
    found.sort(key=lambda item: not item[0])
    if not found:
        fix = "write one: 'inferflow spec new --like SPEC', then --spec FILE"
        raise SpecError(f"no shipped spec serves {key} '{wanted}'", where="config.json", fix=fix)
    if len(found) > 1 and found[0][0] == found[1][0]:
        names = [name for _, name in found]
        raise SpecError(f"several specs serve '{wanted}': {', '.join(names)}", where=key, fix="give one with --spec")
    return load_spec(found[0][1])
