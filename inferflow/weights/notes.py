"""What is worth a look though the model can be served: tensors left out, patterns that ignore nothing, and keys of the config
whose names say that they change the mathematics and that nothing in the spec reads.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..graph.build import build_graph
from ..spec.document import Leaf, Node, Table
from ..spec.library import Spec, list_specs
from .loader import plan_weights
from .source import Source

__all__ = ["check_notes", "unread_keys"]

# A key is told when one of these is found in it and none of those. Tuned on the configs of the shipped families: hardly one
# of them has a note with its own spec.
TELLING = re.compile(
    r"rope|rotary|alibi|window|soft_?cap|scale|scaling|multiplier|norm.*eps|eps$|epsilon|topk|experts|activation|act_fn|act_func"
    r"|hidden_act|clip|sinks?$|attention_chunk"
)
SILENT = re.compile(
    r"^_|dropout|initializer|(^|_)init(_|$)|loss|coef|jitter|label|dtype|quantization|vision|audio|image|video|version|method"
)


def check_notes(spec: Spec, config: Mapping[str, Any], source: Source) -> list[str]:
    """Notes on a spec that `check_spec` has nothing against, one sentence each."""
    graph = build_graph(spec, config, source.tensors).graph
    notes = list(plan_weights(graph, spec, config, source).warnings)
    notes += _idle_patterns(spec, source)
    keys = unread_keys(spec, config)
    if keys:
        shown = ", ".join(f"{key} = {config[key]!r:.40}" for key in keys)
        notes.append(f"the config has keys that may change the mathematics and that the spec does not read: {shown}")
    return notes


def _idle_patterns(spec: Spec, source: Source) -> Iterator[str]:
    """Patterns of `ignore` in the user's own file; a shipped spec's serve several checkpoints."""
    if spec.files[0] in {f"{name}.toml" for name in list_specs()}:
        return
    for section in ("tensors", "gguf"):
        node = spec.tree.table(section).get("ignore")
        items = node.value if isinstance(node, Leaf) and isinstance(node.value, list) else []
        for item in items:
            if item.where.file == spec.files[0] and not fnmatch.filter(source.tensors, str(item.value)):
                yield f"{item.where}: '{item.value}' of ignore matches no tensor"


def unread_keys(spec: Spec, config: Mapping[str, Any]) -> list[str]:
    """Keys of the config that sound like mathematics, have a value that is no usual "nothing", and that no expression of
    the spec mentions."""
    texts = [*_texts(spec.tree), *_texts(spec.blocks)]
    read = {word for text in texts if "cfg" in text for word in re.findall(r"\w+", text)}
    off = config.get("use_sliding_window") is False
    return [
        key
        for key, value in config.items()
        if key not in read
        and _telling(key, value)
        and not (off and "window" in key)
        and not any(config.get(other) == value and _alike(key, other) for other in read)
    ]


def _telling(key: str, value: Any) -> bool:
    if SILENT.search(key):
        return False
    if value is True:
        return "alibi" in key  # other switches add tensors, which would be unused
    nothing = isinstance(value, Mapping) or value in (None, False, 0, 1, "", "default", [])
    return not nothing and bool(TELLING.search(key))


def _alike(one: str, other: str) -> bool:
    """Two keys with a word in common, of which one may be the other by an older name."""
    return bool({word[:5] for word in one.split("_")} & {word[:5] for word in other.split("_")})


def _texts(node: Node) -> Iterator[str]:
    if isinstance(node, Table):
        for inner in node.values():
            yield from _texts(inner)
    elif isinstance(node.value, list):
        for inner in node.value:
            yield from _texts(inner)
    elif isinstance(node.value, str):
        yield node.value
