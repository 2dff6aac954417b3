"""`open_source`: from a path to an opened checkpoint, whatever its format.

A directory gives safetensors before pickles before GGUF; a file is known by its content, not by its name.
"""

from __future__ import annotations

from pathlib import Path

from inferflow.errors import CheckpointError, did_you_mean
from inferflow.weights.config import load_config
from inferflow.weights.files import AGAIN, corrupt, identify
from inferflow.weights.gguf import GGUFSource
from inferflow.weights.l2c import L2CSource
from inferflow.weights.quantised import VOCABULARY, QuantisedSource, is_quantised
from inferflow.weights.safetensors import SafetensorsSource
from inferflow.weights.shards import missing_shards, read_index, shard_set
from inferflow.weights.source import Source
from inferflow.weights.torch_bin import TorchSource

__all__ = ["open_source"]

_NAMED = {".safetensors": "safetensors", ".gguf": "gguf", ".bin": "l2c", ".pt": "zip", ".pth": "zip"}


def open_source(path: str | Path) -> Source:
    """Open the checkpoint at `path`: a model directory, or a .safetensors, .gguf or .bin file.

    Reads headers only and validates them. Raises CheckpointError, with the reason and a fix, for anything else.
    """
    path = Path(path)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise corrupt(
            str(path)[:200], f"is no usable path: {getattr(error, 'strerror', None) or error}", "check the path"
        ) from None
    if is_directory:
        try:
            return _open_directory(path)
        except OSError as error:
            raise corrupt(path, f"cannot be read: {error.strerror}", "check the directory's permissions") from None
    if not exists:
        raise CheckpointError(
            "there is no such file or directory", where=str(path), fix=_similar(path) or "check the path"
        )
    return _open_file(path)


def _similar(path: Path) -> str:
    try:
        return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])
    except OSError:
        return ""


def _open_file(path: Path) -> Source:
    kind = identify(path)
    if kind == "unknown":
        kind = _NAMED.get(path.suffix.lower(), kind)
    if kind == "gguf":
        return GGUFSource(path)
    if kind == "safetensors":
        return _open_safetensors_file(path)
    if kind == "zip":
        return TorchSource(path.parent, [path.name], load_config(path.parent), path=path)
    if kind == "l2c":
        return L2CSource(path)
    if kind == "pickle":
        raise corrupt(
            path, "is a torch file in the old format (before 1.6), which is never read", "convert it to safetensors"
        )
    raise corrupt(
        path, "is no model file of a known format", "give a .safetensors, .gguf or .bin file, or a model directory"
    )


def _open_safetensors_file(path: Path) -> Source:
    """One file; one that is named as a shard stands for the whole split, when the rest of it can be told."""
    directory = path.parent
    split = shard_set(path)
    if split is not None and len(split[0]) > 1:
        return _open_split(directory, split[0], path)
    config = load_config(directory)
    if is_quantised(config):
        return QuantisedSource(directory, path.name, config, path)
    return SafetensorsSource(directory, [path.name], config, path=path)


def _open_split(directory: Path, paths: list[Path], path: Path) -> Source:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _open_indexed(directory, index)
    missing_shards(paths)
    return SafetensorsSource(directory, [shard.name for shard in paths], load_config(directory), path=path)


def _open_indexed(directory: Path, index: Path) -> Source:
    config = load_config(directory)
    weight_map = read_index(index)
    shards = list(dict.fromkeys(weight_map.values()))
    for shard in shards:
        identify(directory / shard)  # names a pointer or a web page
    if index.name.startswith("pytorch_model"):
        return TorchSource(directory, shards, config, weight_map)
    return SafetensorsSource(directory, shards, config, weight_map)


def _open_directory(directory: Path) -> Source:
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (directory / name).exists():
            return _open_named(directory, name)
    loose = sorted(p for p in directory.glob("*.safetensors") if not p.name.startswith("adapter_"))
    if loose:
        return _open_loose(directory, loose)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (directory / name).exists():
            return _open_named(directory, name)
    ggufs = sorted(directory.glob("*.gguf"))
    only_text = all(path.name == VOCABULARY for path in ggufs) and (directory / "config.json").is_file()
    if only_text and is_quantised(load_config(directory)):
        raise corrupt(directory / "model.safetensors", "is missing: it holds the weights", AGAIN)
    if ggufs:
        return _open_ggufs(directory, ggufs)
    if (directory / "adapter_model.safetensors").exists():
        raise corrupt(
            directory, "holds an adapter, not a model", "merge it into its base model and give that directory"
        )
    raise corrupt(
        directory,
        "holds no model: no model.safetensors, pytorch_model.bin or .gguf, nor an index of shards",
        "give the directory that holds the model's weights"
        if any(directory.iterdir())
        else "the directory is empty: " + AGAIN,
    )


def _open_named(directory: Path, name: str) -> Source:
    if name.endswith(".json"):
        return _open_indexed(directory, directory / name)
    return _open_file(directory / name)


def _open_loose(directory: Path, paths: list[Path]) -> Source:
    """Safetensors files without the usual names: exactly one, or exactly one complete split."""
    split = shard_set(paths[0])
    if split is not None and set(paths) <= set(split[0]):
        return _open_split(directory, split[0], directory)
    if len(paths) > 1:
        raise _several(directory, paths)
    return _open_file(paths[0])


def _open_ggufs(directory: Path, paths: list[Path]) -> Source:
    """Exactly one GGUF model, or the shards of one; a projector of images (``mmproj``) is not a model of its own."""
    models = [p for p in paths if "mmproj" not in p.name.lower()] or paths
    heads = {}
    for path in models:
        split = shard_set(path)
        heads[split[0][0] if split else path] = path
    if len(heads) > 1:
        raise _several(directory, sorted(heads))
    return GGUFSource(next(iter(heads.values())))


def _several(directory: Path, paths: list[Path]) -> CheckpointError:
    names = ", ".join(path.name for path in paths[:8]) + (" …" if len(paths) > 8 else "")
    return corrupt(directory, f"holds several models: {names}", "give the path of one of them")
