"""JSON files of a model directory: config.json, generation_config.json and the shard indexes, read with bounds.

Every JSON file is at most 16 MiB (an index 64 MiB), at most 64 levels deep, and an object. ``Infinity`` is accepted,
since configs on the hub use it for open intervals, as is ``{"__float__": "Infinity"}``; ``NaN`` is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inferflow.errors import CheckpointError
from inferflow.weights.files import corrupt, identify, regular_size

__all__ = ["load_config", "parse_object", "read_json_object"]

_CONFIG_LIMIT = 16 << 20
_MAX_DEPTH = 64


def load_config(directory: str | Path) -> dict[str, Any]:
    """The model's config.json; generation_config.json, where there is one, is its ``generation`` entry.

    Raises CheckpointError when config.json is missing, too large, malformed, or not an object.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not path.exists():
        raise corrupt(
            directory, "there is no config.json", "copy the model's config.json into this directory, beside its weights"
        )
    config = read_json_object(path)
    generation = directory / "generation_config.json"
    if generation.is_file():
        config["generation"] = read_json_object(generation)
    return config


def read_json_object(path: Path, limit: int = _CONFIG_LIMIT) -> dict[str, Any]:
    """The JSON object in `path`, of at most `limit` bytes."""
    size = regular_size(path)
    if size > limit:
        raise corrupt(path, f"is {size} bytes long; at most {limit} are accepted", "check that it is the right file")
    identify(path)  # names a Git-LFS pointer or a web page
    try:
        data = path.read_bytes()
    except OSError as error:
        raise corrupt(path, f"cannot be read: {error.strerror}", "check the file's permissions") from None
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """`data` as a JSON object; CheckpointError naming `where` when it is not one."""
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_constant, object_hook=_object)
    except UnicodeDecodeError as error:
        raise corrupt(where, f"is not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise corrupt(where, "is nested too deeply") from None
    except ValueError as error:
        raise corrupt(where, f"is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise corrupt(where, f"holds a JSON {_kind(value)} where an object is expected")
    _check_depth(value, where)
    return value


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a number a model can use")
    return float(name)


def _object(value: dict[str, Any]) -> Any:
    """``{"__float__": "Infinity"}`` is how some configs write what JSON has no word for."""
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity"):
        return float(value["__float__"])
    return value


def _check_depth(value: dict[str, Any], where: str) -> None:
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise CheckpointError(
        f"is nested more than {_MAX_DEPTH} levels deep", where=where, fix="replace it by the model's own file"
    )


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
