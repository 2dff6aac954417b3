"""The native library, loaded with ctypes: its structs, its instruction sets, its thread pool and one call a step.

The structs are those of ``cpu/abi.h``, field by field; loading proves that the sizes agree. ``setup.py`` builds the library;
without it `available` is False and the NumPy reference remains.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, UnsupportedError, did_you_mean

__all__ = [
    "OPCODES",
    "Pool",
    "available",
    "default_threads",
    "isa_name",
    "isas",
    "read_bandwidth",
    "run",
]

MAX_DIMS = 6
TOKENS, ROWS, NONE = 0, 1, 2  # what a leading axis counts
TILE = 16
MAX_THREADS = 1024
FORMATS = ("f32", "f16", "bf16", "q3", "q3.5", "q4", "q8", "keep4", "keep7", "keep8")
CACHE_TYPES = ("f32", "f16", "bf16", "int8")
UNARY = (
    "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh", "softplus", "identity", "exp", "log", "sqrt",
    "abs", "floor", "ceil", "sin", "cos", "clamp", "softcap",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "pow", "min", "max")
REDUCE = ("sum", "mean", "max", "softmax")
NORMS = ("rms", "layer", "l2")
SCORES = ("softmax", "sigmoid", "softmax_topk", "sparsemixer", "identity")
OPCODES = (
    "embed", "positions", "select", "copy", "quantise", "linear", "experts", "norm", "unary", "xielu", "binary", "reduce",
    "concat", "outer", "rope_table", "rope", "store_kv", "sdpa", "conv", "recurrence", "router", "combine", "gate",
    "glu", "peaks", "weigh", "reach",
)  # fmt: skip


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p), ("buffer", c_int32), ("leading", c_int32), ("ndim", c_int32), ("pad", c_int32), ("offset", c_int64),
        ("stride", c_int64), ("sizes", c_int64 * MAX_DIMS), ("strides", c_int64 * MAX_DIMS),
    ]  # fmt: skip


class Span(Structure):
    _fields_ = [(name, c_int64) for name in ("start", "count", "past", "blocks", "slot")]


class Step(Structure):
    _fields_ = [
        ("tokens", c_int64), ("rows", c_int64), ("ids", c_void_p), ("positions", c_void_p), ("row_index", c_void_p),
        ("span_of", c_void_p), ("spans", c_void_p), ("span_count", c_int64), ("block_table", c_void_p), ("buffers", c_void_p),
    ]  # fmt: skip


class Matrix(Structure):
    _fields_ = [
        ("format", c_int32), ("group", c_int32), ("rows", c_int64), ("cols", c_int64), ("padded", c_int64), ("stack", c_int64),
        ("rotation", c_int64), ("codes", c_void_p), ("scales", c_void_p), ("mins", c_void_p), ("row_scales", c_void_p),
        ("bias", c_void_p), ("codebook", c_void_p), ("codes_stride", c_int64), ("scales_stride", c_int64),
        ("rows_stride", c_int64),
    ]  # fmt: skip


class Op(Structure):
    _fields_ = [("code", c_int32), ("pad", c_int32), ("args", c_void_p)]


class EmbedArgs(Structure):
    _fields_ = [
        ("input", Tensor),
        ("out", Tensor),
        ("table", POINTER(Matrix)),
        ("source", c_int64),
        ("offset", c_int64),
    ]


class PositionsArgs(Structure):
    _fields_ = [("out", Tensor)]


class SelectArgs(Structure):
    _fields_ = [("input", Tensor), ("out", Tensor)]


class CopyArgs(Structure):
    _fields_ = [("input", Tensor), ("out", Tensor)]


class QuantiseArgs(Structure):
    _fields_ = [("input", Tensor), ("out", Tensor), *((n, c_int64) for n in ("cols", "padded", "group", "rotation"))]


class LinearArgs(Structure):
    _fields_ = [
        ("input", Tensor), ("count", c_int64), ("matrices", POINTER(Matrix)), ("outs", POINTER(Tensor)),
        ("residuals", POINTER(Tensor)),
    ]  # fmt: skip


class ExpertsArgs(Structure):
    _fields_ = [
        ("input", Tensor), ("ids", Tensor), ("out", Tensor), ("matrix", POINTER(Matrix)), ("topk", c_int64),
        ("per_choice", c_int64),
    ]  # fmt: skip


class NormArgs(Structure):
    _fields_ = [
        ("input", Tensor), ("out", Tensor), ("weight", c_void_p), ("bias", c_void_p), ("quantise", POINTER(QuantiseArgs)),
        ("kind", c_int64), ("per_head", c_int64), ("eps", c_double),
    ]  # fmt: skip


class UnaryArgs(Structure):
    _fields_ = [("input", Tensor), ("out", Tensor), ("kind", c_int64), ("a", c_double)]


class XieluArgs(Structure):
    _fields_ = [
        ("input", Tensor), ("alpha_p", Tensor), ("alpha_n", Tensor), ("out", Tensor), ("beta", c_double), ("eps", c_double),
    ]  # fmt: skip


class BinaryArgs(Structure):
    _fields_ = [("a", Tensor), ("b", Tensor), ("out", Tensor), ("kind", c_int64)]


class GateArgs(Structure):
    _fields_ = [("a", Tensor), ("b", Tensor), ("out", Tensor), ("quantise", POINTER(QuantiseArgs)), ("kind", c_int64)]


class GluArgs(Structure):
    _fields_ = [
        ("input", Tensor), ("matrices", POINTER(Matrix)), ("quantise", POINTER(QuantiseArgs)), ("kind", c_int64),
    ]  # fmt: skip


class ReduceArgs(Structure):
    _fields_ = [("input", Tensor), ("out", Tensor), ("kind", c_int64)]


class ConcatArgs(Structure):
    _fields_ = [("out", Tensor), ("count", c_int64), ("parts", POINTER(Tensor))]


class OuterArgs(Structure):
    _fields_ = [("a", Tensor), ("b", Tensor), ("out", Tensor)]


class RopeTableArgs(Structure):
    _fields_ = [
        ("out", Tensor), ("inverse", c_void_p), ("factors", c_void_p), ("variant_of", c_void_p), ("half", c_int64),
    ]  # fmt: skip


class RopeArgs(Structure):
    _fields_ = [("input", Tensor), ("table", Tensor), ("out", Tensor), ("half", c_int64), ("pairing", c_int64)]


class Cache(Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("keys", "values", "key_scales", "value_scales")),
        *((n, c_int64) for n in ("type", "block", "heads", "dim", "vdim")),
    ]  # fmt: skip


class StoreKvArgs(Structure):
    _fields_ = [("k", Tensor), ("v", Tensor), ("cache", POINTER(Cache))]


class SdpaArgs(Structure):
    _fields_ = [
        ("q", Tensor), ("out", Tensor), ("cache", POINTER(Cache)), ("sinks", c_void_p), ("slopes", c_void_p),
        *((n, c_int64) for n in ("window", "chunk", "bfloat16")), *((n, c_double) for n in ("scale", "softcap", "alibi_scale")),
    ]  # fmt: skip


class ConvArgs(Structure):
    _fields_ = [
        ("input", Tensor), ("out", Tensor), ("weight", c_void_p), ("bias", c_void_p), ("state", c_void_p), ("kernel", c_int64),
    ]  # fmt: skip


class RecurrenceArgs(Structure):
    _fields_ = [
        *((n, Tensor) for n in ("q", "k", "v", "decay", "beta", "out")), ("state", c_void_p),
        *((n, c_int64) for n in ("heads", "groups", "dk", "dv", "decay_per_key")),
    ]  # fmt: skip


class RouterArgs(Structure):
    _fields_ = [
        *((n, Tensor) for n in ("logits", "bias", "ids", "weights")),
        *((n, c_int64) for n in ("experts", "top_k", "score", "normalise", "groups", "top_groups", "group_top2")),
        *((n, c_double) for n in ("norm_min", "scale", "jitter")),
    ]  # fmt: skip


class CombineArgs(Structure):
    _fields_ = [("y", Tensor), ("weights", Tensor), ("out", Tensor)]


class Rows(Structure):
    _fields_ = [
        ("logits", c_void_p), ("at", c_void_p), *((n, c_int64) for n in ("count", "vocab", "stride", "columns")),
    ]  # fmt: skip


class PeaksArgs(Structure):
    _fields_ = [("rows", Rows), *((n, c_void_p) for n in ("peaks", "best", "tokens"))]


class WeighArgs(Structure):
    _fields_ = [("rows", Rows), *((n, c_void_p) for n in ("best", "scale", "sums"))]


class ReachArgs(Structure):
    _fields_ = [
        ("rows", Rows), ("peaks", c_void_p), ("floor", c_void_p), ("room", c_int64), ("keys", c_void_p), ("counts", c_void_p),
    ]  # fmt: skip


_MIRRORS: tuple[type[Structure], ...] = (
    Tensor, Span, Step, Matrix, Op, EmbedArgs, PositionsArgs, SelectArgs, CopyArgs, QuantiseArgs, LinearArgs, ExpertsArgs,
    NormArgs, UnaryArgs, XieluArgs, BinaryArgs, GateArgs, ReduceArgs, ConcatArgs, OuterArgs, RopeTableArgs, RopeArgs, Cache,
    StoreKvArgs, SdpaArgs, ConvArgs, RecurrenceArgs, RouterArgs, CombineArgs, Rows, PeaksArgs, WeighArgs, ReachArgs,
)  # fmt: skip


@cache
def _library() -> ctypes.CDLL | None:
    path = Path(__file__).parent / "cpu" / "engine.so"
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    library.inferflow_isa_name.restype = c_char_p
    library.inferflow_pool_new.restype = c_void_p
    library.inferflow_pool_delete.argtypes = [c_void_p]
    library.inferflow_run.argtypes = [c_void_p, c_int, POINTER(Op), c_int64, POINTER(Step), c_void_p]
    library.inferflow_size.restype = c_int64
    library.inferflow_read_bandwidth.restype = c_double
    library.inferflow_read_bandwidth.argtypes = [c_void_p, c_int64, c_int, c_int]
    for n, mirror in enumerate(_MIRRORS):
        if library.inferflow_size(n) != ctypes.sizeof(mirror):
            fix = "build it again: pip install --force-reinstall inferflow"
            raise UnsupportedError(
                f"the native library is of another version ({mirror.__name__})", where=str(path), fix=fix
            )
    return library


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        fix = "reinstall where there is a C++ compiler, or use engine='reference'"
        raise UnsupportedError("the native engine was not built", where="engine", fix=fix)
    return library


def available() -> bool:
    """Whether the native library is here."""
    return _library() is not None


def isas() -> dict[str, int]:
    """The instruction sets that this build holds and this processor has, best first: name -> number."""
    library = _loaded()
    names = iter(lambda: library.inferflow_isa_name(len(seen)), None)
    seen: list[str] = []
    for name in names:
        seen.append(name.decode())
    return {name: n for n, name in enumerate(seen) if library.inferflow_isa_supported(n)}


def isa_name(wanted: str | None = None) -> str:
    """`wanted`, if it is one of `isas`, else ArgumentError; the best one for None."""
    names = list(isas())
    if wanted is None:
        return names[0]
    if wanted not in names:
        fix = did_you_mean(wanted, names) or f"this machine has {', '.join(names)}"
        raise ArgumentError(f"there is no instruction set '{wanted}'", where="isa", fix=fix)
    return wanted


def default_threads() -> int:
    """Processors that this process may use: its affinity, and the quota of its control group, rounded up."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    count: int = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    return max(1, min([count, *_quotas()]))


def _quotas(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Whole processors that the control groups around this process allow, where they say so (cgroup v1 and v2)."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:  # number:controllers:path, no controllers in v2
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (root / controllers, root / "cpu") if controllers else (root, root / "unified"):
            here = mount / path.lstrip("/")
            for folder in (here, *here.parents):  # a container may see its own group as the root
                if folder.is_relative_to(mount):
                    yield from _quota(folder)


def _quota(folder: Path) -> Iterator[int]:
    """What one control group allows, rounded up."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if int(quota) > 0:
                yield -(-int(quota) // int(period))
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            continue


class Pool:
    """A team of `threads` threads, the caller's included. One step at a time."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = default_threads() if threads is None else threads
        if not 1 <= self.threads <= MAX_THREADS:
            raise ArgumentError(f"it is {threads}", where="threads", fix=f"give a whole number from 1 to {MAX_THREADS}")
        self._library = _loaded()
        self._handle = self._library.inferflow_pool_new(self.threads)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.inferflow_pool_delete(self._handle)


def run(pool: Pool, isa: int, ops: Any, count: int, step: Step, seconds: np.ndarray | None = None) -> None:
    """One step: `ops` (an array of `count` Op) in order, without the GIL. `isa` is a number of `isas`. `seconds`, float64
    [count], has each operation's time added."""
    at = None if seconds is None else seconds.ctypes.data
    pool._library.inferflow_run(pool._handle, isa, ops, count, ctypes.byref(step), at)


def read_bandwidth(threads: int | None = None, megabytes: int = 256, repeats: int = 3) -> float:
    """GB/s at which `threads` threads read memory: the best of `repeats` passes over `megabytes` MB."""
    data = np.ones((megabytes << 20) + 64, np.uint8)
    start = -data.ctypes.data % 64
    count = default_threads() if threads is None else threads
    return float(_loaded().inferflow_read_bandwidth(data.ctypes.data + start, megabytes << 20, count, repeats) / 1e9)


def array(kind: type[Structure], items: Sequence[Structure]) -> Any:
    """A C array of structs."""
    return (kind * max(1, len(items)))(*items)
