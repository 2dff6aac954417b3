"""Which file holds which tensor: the index of a sharded checkpoint, and the merging of shards without one.

An index is trusted for the assignment of names to files and for nothing else: its paths may not leave the directory,
its files must exist, and each must hold what the index says. A tensor in two files belongs to the one that the index
names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar

from inferflow.errors import did_you_mean
from inferflow.weights.config import read_json_object
from inferflow.weights.files import Bytes, corrupt, map_file

__all__ = ["missing_shards", "open_shards", "read_index", "shard_set"]

Slot = TypeVar("Slot")

_INDEX_LIMIT = 64 << 20
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.[a-z]+)")


def read_index(path: Path) -> dict[str, str]:
    """The ``weight_map`` (tensor name to file name) of a ``*.index.json``; every file it names exists beside it."""
    weight_map = read_json_object(path, _INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise corrupt(path, "has no 'weight_map' object that says which file holds which tensor")
    for shard in dict.fromkeys(v if isinstance(v, str) else repr(v) for v in weight_map.values()):
        _check_inside(shard, path)
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise corrupt(path, f"maps tensor '{name}' to {shard!r}, which is not a file name")
    counts = Counter(weight_map.values())
    absent = [(shard, n) for shard, n in counts.items() if not (path.parent / shard).is_file()]
    if absent:
        shard, count = absent[0]
        more = f", and {len(absent) - 1} other files are missing too" if len(absent) > 1 else ""
        raise corrupt(
            path, f"names {shard}, which is not there and should hold {count} tensors{more}", f"download {shard}"
        )
    return weight_map


def _check_inside(shard: str, index: Path) -> None:
    """A shard's path must stay inside the directory: relative, no '..', no drive, no control characters."""
    parts = PurePosixPath(shard).parts
    windows = PureWindowsPath(shard)
    bad = not parts or ".." in parts or ".." in windows.parts or shard.startswith("/") or windows.drive or windows.root
    if bad or any(ord(c) < 32 for c in shard) or len(shard) > 255:
        raise corrupt(
            index,
            f"names the file {shard[:80]!r}, which is outside the model's directory or no file name",
            "do not use this index: write one whose files lie beside it",
        )


def shard_set(path: Path) -> tuple[list[Path], int] | None:
    """All the paths of the split that `path` (``…-00001-of-00003.ext``) belongs to, and its own number from 0; else
    None."""
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None:
        return None
    count, number = int(match["count"]), int(match["number"])
    if not 1 <= number <= count:
        raise corrupt(path, f"is named as shard {number} of {count}", "give the file its proper name")
    if count > 10_000:
        raise corrupt(path, f"is named as one of {count} shards; at most 10000 are accepted", "merge the shards")
    names = (f"{match['stem']}-{i:05d}-of-{count:05d}{match['suffix']}" for i in range(1, count + 1))
    return [path.with_name(name) for name in names], number - 1


def missing_shards(paths: Iterable[Path]) -> None:
    """CheckpointError naming the first absent file of a split, when there is one."""
    paths = list(paths)
    absent = [path for path in paths if not path.is_file()]
    if absent:
        first = absent[0]
        raise corrupt(first, f"this shard is missing ({len(absent)} of {len(paths)} are)", f"download {first.name}")


def assign(
    contents: Mapping[str, Collection[str]], weight_map: Mapping[str, str] | None, where: Path
) -> dict[str, str]:
    """Tensor name to shard name, each tensor exactly once, from what each shard holds (`contents`) and the index, if
    any.

    Raises CheckpointError when a shard lacks what the index promises, or two shards hold a tensor the index leaves
    open.
    """
    owner: dict[str, str] = {}
    for name, shard in (weight_map or {}).items():
        if name not in contents[shard]:
            hint = did_you_mean(name, contents[shard]) if len(contents[shard]) < 2000 else ""
            raise corrupt(
                where, f"says that {shard} holds tensor '{name}', which it does not", hint or f"download {shard} again"
            )
        owner[name] = shard
    for shard, names in contents.items():
        for name in names:
            if name in owner and owner[name] != shard and (weight_map is None or name not in weight_map):
                raise corrupt(
                    where,
                    f"tensor '{name}' is in {owner[name]} and in {shard}, and no index says which one counts",
                    "remove the file that does not belong to this model",
                )
            owner.setdefault(name, shard)
    return owner


def open_shards(
    directory: Path,
    shards: list[str],
    weight_map: Mapping[str, str] | None,
    where: Path,
    parse: Callable[[Bytes, Path], Mapping[str, Slot]],
) -> tuple[dict[str, Bytes], dict[str, tuple[str, Slot]]]:
    """(each shard's mapped bytes; each tensor's shard and slot, as `parse` reads them from a shard's header).
    CheckpointError when there is no tensor in any."""
    data = {shard: map_file(directory / shard) for shard in shards}
    slots = {shard: parse(mapped, directory / shard) for shard, mapped in data.items()}
    owner = assign(slots, weight_map, where)
    if not owner:
        raise corrupt(where, "holds no tensors", "check that it is the model's own weights file")
    return data, {name: (shard, slots[shard][name]) for name, shard in owner.items()}
