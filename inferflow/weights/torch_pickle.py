"""The pickle inside a torch checkpoint, read as data: a stack machine that can build tensors' descriptions and nothing
else.

No pickle is ever unpickled. `describe` interprets the few opcodes that `torch.save` writes for a state dict; a global
is only a name, and the only calls it knows make an ordered dict or a record of a tensor. Any other opcode, global or
call is refused before it has an effect, so a hostile file has nothing to run. Every step consumes input and builds at
most what it read, which bounds memory by the file's size. Source of the opcodes: the Python standard library's
`pickletools`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from inferflow.errors import CheckpointError

__all__ = ["Storage", "TensorRecord", "describe"]

_STACK_LIMIT = 1 << 15  # torch.save empties its stack every thousand items
_FIX = "do not load this file elsewhere either; get the model as safetensors"


class Storage(NamedTuple):
    """One member of the archive, ``data/<key>``: `numel` elements of `dtype` (bytes, where dtype is None)."""

    key: str
    dtype: str | None
    numel: int


class TensorRecord(NamedTuple):
    """A strided view of a storage; offset and strides in elements. None of it is validated here."""

    storage: Storage
    offset: Any
    shape: Any
    stride: Any
    dtype: str | None


class _Global(NamedTuple):
    name: str


class _Mark:
    pass


# Names of torch's storage classes and dtypes, and ours.
_STORAGES = {
    **{"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"},
    **{"LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8"},
    "BoolStorage": "BOOL",
}
_DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"},
    **{"int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
_ALLOWED = frozenset(
    {
        *(f"torch.{name}" for name in (*_STORAGES, *_DTYPES, "Size")),
        *("torch.storage.UntypedStorage", "torch.storage.TypedStorage"),
        *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter"),
        "collections.OrderedDict",
    }
)


def describe(data: bytes, where: str) -> Any:
    """The object that pickle `data` describes: dicts, lists, tuples, numbers, strings and `TensorRecord`s.

    Raises CheckpointError for every opcode, global or call beyond a state dict's, naming it.
    """
    return _Machine(data, where).run()


class _Machine:
    def __init__(self, data: bytes, where: str) -> None:
        self.data = data
        self.at = 0
        self.where = where
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def fail(self, reason: str, fix: str = _FIX) -> NoReturn:
        raise CheckpointError(reason, where=self.where, fix=fix)

    def run(self) -> Any:
        while True:
            op = self.take(1)[0]
            if op == _STOP:
                return self.pop()
            handler = _HANDLERS.get(op)
            if handler is None:
                self.fail(f"the pickle uses opcode {op:#04x}, which no state dict needs: refused")
            handler(self)
            if len(self.stack) > _STACK_LIMIT:
                self.fail("the pickle piles up more values than a state dict needs: refused")

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            self.fail("the pickle is cut short", "download the file again")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 256)
        if end < 0:
            self.fail("the pickle has a name without an end")
        return self.decode(self.take(end + 1 - self.at)[:-1])

    def decode(self, text: bytes) -> str:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            self.fail("the pickle has a string that is not UTF-8")

    def pop(self) -> Any:
        if not self.stack:
            self.fail("the pickle takes more from its stack than it put there")
        value = self.stack.pop()
        if isinstance(value, _Mark):
            self.fail("the pickle has a mark where a value is expected")
        return value

    def top(self) -> Any:
        value = self.pop()
        self.stack.append(value)
        return value

    def pop_mark(self) -> list[Any]:
        i = len(self.stack) - 1
        while i >= 0 and not isinstance(self.stack[i], _Mark):
            i -= 1
        if i < 0:
            self.fail("the pickle has no mark where one is expected")
        values = self.stack[i + 1 :]
        del self.stack[i:]
        return values

    def push_global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            self.fail("the pickle names a global by what is no string")
        full = f"{module}.{name}"
        if full not in _ALLOWED:
            self.fail(f"the pickle asks for '{full[:100]}', which a file of weights has no business with: refused")
        self.stack.append(_Global(full))

    def get(self, index: int) -> None:
        if index not in self.memo:
            self.fail("the pickle recalls what it has not stored")
        self.stack.append(self.memo[index])

    def put(self, index: int) -> None:
        self.memo[index] = self.top()

    def set_items(self, target: Any, pairs: list[Any]) -> None:
        if not isinstance(target, dict) or len(pairs) % 2:
            self.fail("the pickle sets an item of what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, (str, int, float)):
                self.fail("the pickle has a dict key that is neither a string nor a number")
            target[key] = value

    def append(self, target: Any, values: list[Any]) -> None:
        if not isinstance(target, list):
            self.fail("the pickle appends to what is no list")
        target.extend(values)

    def persistent(self) -> None:
        """``('storage', class, key, location, numel)``, torch's reference to a member of the archive."""
        pid = self.pop()
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], _Global)):
            self.fail("the pickle refers to a storage in an unknown way")
        kind, key, numel = pid[1].name.rpartition(".")[2], pid[2], pid[4]
        if not isinstance(key, str) or type(numel) is not int or not 0 <= numel < 2**62:
            self.fail("the pickle has a storage without a proper name or size")
        if kind not in _STORAGES and kind != "UntypedStorage":
            self.fail(f"the pickle has a storage of class {kind}")
        self.stack.append(Storage(key, _STORAGES.get(kind), numel))

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            self.fail("the pickle calls what is no function")
        name = function.name.rpartition(".")[2]
        if name == "OrderedDict" and not arguments:
            self.stack.append({})
        elif (name == "Size" and len(arguments) == 1 and isinstance(arguments[0], tuple)) or (
            name == "_rebuild_parameter" and arguments and isinstance(arguments[0], TensorRecord)
        ):
            self.stack.append(arguments[0])
        elif name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3") and len(arguments) >= 6:
            self.stack.append(self.tensor(name, arguments))
        else:
            self.fail(f"the pickle calls '{function.name}' in a way that no state dict does: refused")

    def tensor(self, name: str, arguments: tuple[Any, ...]) -> TensorRecord:
        storage, offset, shape, stride = arguments[:4]
        if not isinstance(storage, Storage):
            self.fail("the pickle makes a tensor of what is no storage")
        dtype = storage.dtype
        if name == "_rebuild_tensor_v3":
            given = arguments[6] if len(arguments) > 6 else None
            if not isinstance(given, _Global) or (dtype := _DTYPES.get(given.name.rpartition(".")[2])) is None:
                self.fail("the pickle makes a tensor of an unknown type")
        return TensorRecord(storage, offset, shape, stride, dtype)

    def build(self) -> None:
        """State set on an object: torch keeps version numbers there, which nobody needs."""
        self.pop()
        if not isinstance(self.top(), dict):
            self.fail("the pickle sets the state of an object: refused")


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value(m))


def _tuple(count: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        values = [m.pop() for _ in range(count)]
        m.stack.append(tuple(reversed(values)))

    return handler


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items(m.top(), [key, value])


def _set_items(m: _Machine) -> None:
    pairs = m.pop_mark()
    m.set_items(m.top(), pairs)


def _append(m: _Machine) -> None:
    value = m.pop()
    m.append(m.top(), [value])


def _appends(m: _Machine) -> None:
    values = m.pop_mark()
    m.append(m.top(), values)


def _global(m: _Machine) -> None:
    module = m.line()
    m.push_global(module, m.line())


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    m.push_global(module, name)


def _protocol(m: _Machine) -> None:
    if not 2 <= m.number("<B") <= 5:
        m.fail("the pickle has an unknown protocol")


def _frame(m: _Machine) -> None:
    m.take(8)  # its length, which only a stream's reader needs


def _long1(m: _Machine) -> int:
    return int.from_bytes(m.take(m.number("<B")), "little", signed=True)


_STOP = ord(".")
_HANDLERS: dict[int, Callable[[_Machine], None]] = {
    0x80: _protocol,
    0x95: _frame,
    ord("("): _push(lambda m: _Mark()),
    ord("N"): _push(lambda m: None),
    0x88: _push(lambda m: True),
    0x89: _push(lambda m: False),
    ord("J"): _push(lambda m: m.number("<i")),
    ord("K"): _push(lambda m: m.number("<B")),
    ord("M"): _push(lambda m: m.number("<H")),
    0x8A: _push(_long1),
    ord("G"): _push(lambda m: float(struct.unpack(">d", m.take(8))[0])),
    ord("X"): _push(lambda m: m.decode(m.take(m.number("<I")))),
    0x8C: _push(lambda m: m.decode(m.take(m.number("<B")))),
    ord("]"): _push(lambda m: []),
    ord("}"): _push(lambda m: {}),
    ord(")"): _push(lambda m: ()),
    ord("t"): _push(lambda m: tuple(m.pop_mark())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord("a"): _append,
    ord("e"): _appends,
    ord("c"): _global,
    0x93: _stack_global,
    ord("q"): lambda m: m.put(m.number("<B")),
    ord("r"): lambda m: m.put(m.number("<I")),
    0x94: lambda m: m.put(len(m.memo)),
    ord("h"): lambda m: m.get(m.number("<B")),
    ord("j"): lambda m: m.get(m.number("<I")),
    ord("Q"): lambda m: m.persistent(),
    ord("R"): lambda m: m.reduce(),
    ord("b"): lambda m: m.build(),
}
