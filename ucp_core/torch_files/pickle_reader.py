"""Read a pickle as plain values and execute nothing: the reader knows data and names of classes.

The machine can neither import nor call what a pickle names: it looks a name up in a table of our
own functions (``pickle_classes``), and an unknown name is an error. Every opcode costs bounded time
and memory: what a pickle builds is no larger than the pickle, except for values it shares with
itself. It reads protocols 2 to 5, which torch, DeepSpeed and Megatron write. Source: the comments
of ``Lib/pickletools.py`` of CPython 3.11, which define the opcodes.

``pickle.Unpickler`` with ``find_class`` imports nothing unlisted either, and is 5 times as fast.
But its dicts and its memo are C code without hooks, and these pickles break it (CPython 3.11;
``tests/support/hostile_pickles.py`` has them):

- "endless hash", 133 bytes: a dict key is a tuple that holds itself twice at 64 levels. Hashing it
  never ends and ignores signals.
- "deep key", 300 KB: a tuple nested 300,000 levels deep is a key. The process ends by SIGSEGV.
- "memo index", 7 bytes: LONG_BINPUT with index 2**31 takes 32 GiB.

Finding these in advance means following the stack opcode by opcode, as this machine does.
``pickle._Unpickler``, in Python, is 2 to 3 times as slow.
"""

import gc
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ucp_core.errors import CheckpointCorruptError, UcpError
from ucp_core.torch_files.budget import Budget, current_budget
from ucp_core.torch_files.pickle_classes import (
    Allow,
    Array,
    Global,
    Opaque,
    Resolver,
    check_key,
    expect,
)

#: The largest pickle to read. The metadata of a million fragments has about 250 MB.
PICKLE_BYTES_MAX = 1 << 30
_PROTOCOL_MAX = 5
#: Size of the largest integer; the state of a generator has 19,968 bits.
_LONG_BYTES_MAX = 4096
_DEPTH_MAX = 1 << 20
_COPIED_MIN = 1 << 16
_SIZED = frozenset((list, tuple, dict, set, frozenset, str, bytes))
#: Estimate of the most memory that an opcode takes in CPython 3.11: its object with room to grow,
#: its place on the stack, its number in the memo. The budget counts these bytes in the pickle,
#: texts included, so opcodes that are lowercase letters pay only when they run (``pay``).
_COSTS = {
    8: b")NKh\x88\x89",
    32: b"G",
    40: b"(MJC\x8a",
    56: b"X\x85\x8c",
    64: b"\x81\x86",
    72: b"\x94\x87",
    96: b"]",
    128: b"\x93",
    192: b"}",
    256: b"\x8f\x91",
}
#: Cost of every byte: a copy of it in a text, and a copy on the way there.
_BYTE_COST = 2
_OBJECT_BYTES = 256
_ELEMENT_BYTES = 128
#: Entries of the memo, or values of a container, that are paid for together.
_MANY = 1 << 12

_BYTE, _INT32, _UINT32, _UINT64, _FLOAT64 = map(struct.Struct, ("B", "<i", "<I", "<Q", ">d"))
_uint32 = _UINT32.unpack_from


def read_pickle(
    data: bytes,
    *,
    where: str,
    allow: Allow = frozenset(),
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what ``data`` describes, made of plain values and stand-ins.

    Containers, numbers, strings and bytes come as themselves, ``OrderedDict`` and ``defaultdict``
    as ``dict``, ``torch.Size`` as ``tuple``, numpy scalars as Python's, arrays as ``NumpyArray``,
    classes and dtypes as ``Global``, objects of the allowed foreign classes as ``Opaque``.

    Args:
        data: One pickle.
        allow: More classes: names (a name that ends with a dot allows everything below it) that
            become ``Opaque``, or a mapping from a name to the function that makes the value.
        persistent: Resolves persistent ids; without it they are an error.
    """
    if len(data) > PICKLE_BYTES_MAX:
        raise CheckpointCorruptError(
            f"{where}: its pickle has {len(data)} bytes, more than {PICKLE_BYTES_MAX}: "
            "this is not a checkpoint",
            path=where,
        )
    budget = current_budget()
    opcodes = sum(data.count(code) * cost for cost, codes in _COSTS.items() for code in codes)
    budget.draw(_BYTE_COST * len(data) + opcodes, where)
    machine = _Machine(bytes(data), Resolver(allow, where), persistent, budget, where)
    try:
        with collector_paused():
            return machine.run()
    except UcpError:
        raise
    except Exception as error:
        raise CheckpointCorruptError(
            f"{where}: its pickle is damaged near byte {machine.pos} "
            f"({type(error).__name__}: {error}): use another copy or an older checkpoint",
            path=where,
        ) from error


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would visit a million new objects repeatedly.

    It took a third of the time to open 20,000 chunks.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True, eq=False)
class _Machine:
    """The stack machine; ``_CODES`` says what all but the most frequent opcodes do."""

    data: bytes
    resolver: Resolver
    persistent: Callable[[Any], Any] | None
    budget: Budget
    where: str
    pos: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    #: A pickle can refer to one value often, and each call copies it.
    copied: int = 0

    def run(self) -> Any:
        data, table, stack, memo = self.data, _TABLE, self.stack, self.memo
        pos = 0
        try:
            while True:
                code = data[pos]
                pos += 1
                # These five are half of all opcodes; calling methods for them took a third of the
                # time.
                if code == _LONG_BINGET:
                    stack.append(memo[_uint32(data, pos)[0]])
                    pos += 4
                elif code == _BINGET:
                    stack.append(memo[data[pos]])
                    pos += 1
                elif code == _MEMOIZE:
                    memo[len(memo)] = stack[-1]
                elif code == _BININT2:
                    stack.append(data[pos] + (data[pos + 1] << 8))
                    pos += 2
                elif code == _BININT1:
                    stack.append(data[pos])
                    pos += 1
                elif code == _STOP:
                    (value,) = stack
                    return value
                else:
                    handler = table[code]
                    if handler is None:
                        msg = f"opcode {code:#04x} is one that no known writer uses"
                        raise ValueError(msg)
                    self.pos = pos
                    handler(self)
                    pos = self.pos
        finally:
            self.pos = max(pos, self.pos)

    # Reading arguments.

    def take(self, size: int) -> bytes:
        low = self.pos
        self.pos = high = low + size
        if high > len(self.data):
            msg = f"{size} bytes are announced, {len(self.data) - low} are left"
            raise ValueError(msg)
        return self.data[low:high]

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.pos)
        self.pos += form.size
        return value

    def _line(self) -> str:
        stop = self.data.index(b"\n", self.pos)
        text = self.data[self.pos : stop].decode()
        self.pos = stop + 1
        return text

    def pay(self, num_bytes: int) -> None:
        self.budget.draw(num_bytes, self.where)

    def text(self, size: int) -> str:
        data = self.take(size)
        # One wide character makes all characters of a text wide.
        if len(data) > _COPIED_MIN and not data.isascii():
            self.pay(4 * len(data))
        return str(data, "utf-8", "surrogatepass")

    def items(self) -> list[Any]:
        """Remove and return the values above the last mark."""
        mark = self.marks.pop()
        if len(self.stack) - mark > _MANY:
            self.pay(16 * (len(self.stack) - mark))
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def keys(self) -> list[Any]:
        """Remove and return the values above the last mark, which are hashed next."""
        items = self.items()
        for item in items:
            check_key(item)
        return items

    # Frame, mark, stack.

    def op_proto(self) -> None:
        version = self.number(_BYTE)
        if version > _PROTOCOL_MAX:
            msg = f"pickle protocol {version} is not known"
            raise ValueError(msg)

    def op_mark(self) -> None:
        if len(self.marks) > _DEPTH_MAX:
            msg = "containers are nested too deeply"
            raise ValueError(msg)
        self.marks.append(len(self.stack))

    def op_dup(self) -> None:
        self.pay(_ELEMENT_BYTES)
        self.stack.append(self.stack[-1])

    # The memo, for values used again.

    def op_binput(self) -> None:
        self.memo[self.data[self.pos]] = self.stack[-1]
        self.pos += 1

    def op_long_binput(self) -> None:
        self.memo[_uint32(self.data, self.pos)[0]] = self.stack[-1]
        self.pos += 4
        if not len(self.memo) % _MANY:
            self.pay(_MANY * _ELEMENT_BYTES)

    # Plain values.

    def op_long4(self) -> None:
        size = self.number(_UINT32)
        if size > _LONG_BYTES_MAX:
            msg = f"an integer of {size} bytes"
            raise ValueError(msg)
        self.stack.append(_integer(self.take(size)))

    def op_text(self) -> None:
        (size,) = _uint32(self.data, self.pos)
        self.pos += 4
        self.stack.append(self.text(size))

    def op_short_text(self) -> None:
        # If the slice is too short, the next opcode is missing, which is an error.
        low = self.pos + 1
        self.pos = high = low + self.data[low - 1]
        self.stack.append(str(self.data[low:high], "utf-8", "surrogatepass"))

    # Containers.

    def op_empty_tuple(self) -> None:
        stack, memo, low = self.stack, self.memo, self.pos
        if self.data[low : low + len(_NEW_OBJECT)] != _NEW_OBJECT:
            stack.append(())
            return
        self.pos = low + len(_NEW_OBJECT)
        state: dict[Any, Any] = {}
        count = len(memo)
        stack[-1] = memo[count] = expect(stack[-1], Global).make()
        memo[count + 1] = state
        stack.append(state)
        self.op_mark()

    def op_list(self) -> None:
        self.pay(_OBJECT_BYTES)
        self.stack.append(self.items())

    def op_tuple3(self) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def op_tuple2(self) -> None:
        stack, memo, low = self.stack, self.memo, self.pos
        last = stack.pop()
        pair = (stack[-1], last)
        if self.data[low : low + len(_CALL_WITH)] != _CALL_WITH:
            stack[-1] = pair
            return
        self.pos = low + len(_CALL_WITH)
        stack.pop()
        count = len(memo)
        memo[count], memo[count + 1] = pair, (pair,)
        # ``copied`` need not count it: a pair is no larger than these opcodes.
        stack[-1] = memo[count + 2] = expect(stack[-1], Global).make(pair)

    def op_dict(self) -> None:
        self.pay(_OBJECT_BYTES)
        items = self.items()
        self.stack.append(_filled({}, items))

    def op_appends(self) -> None:
        items = self.items()
        expect(self.stack[-1], list).extend(items)

    def op_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        _filled(self.stack[-1], [key, value])

    def op_setitems(self) -> None:
        # No separate list is made, because every object with attributes comes here.
        stack, mark = self.stack, self.marks.pop()
        if not mark or (len(stack) - mark) % 2:
            msg = "a key has no value, or no dict to be in"
            raise ValueError(msg)
        if len(stack) - mark > _MANY:
            self.pay(_ELEMENT_BYTES // 2 * (len(stack) - mark))
        target = expect(stack[mark - 1], dict)
        for index in range(mark, len(stack), 2):
            key = stack[index]
            if type(key) is not str:
                check_key(key)
            target[key] = stack[index + 1]
        del stack[mark:]

    def op_additems(self) -> None:
        items = self.keys()
        expect(self.stack[-1], set).update(items)

    # Names and objects. None of this reaches Python's own names.

    def op_global(self) -> None:
        module = self._line()
        self.stack.append(self.resolver.find(module, self._line()))

    def op_stack_global(self) -> None:
        name = self.stack.pop()
        module = self.stack.pop()
        if type(name) is not str or type(module) is not str:
            msg = "the name of a class is not a string"
            raise TypeError(msg)
        self.stack.append(self.resolver.find(module, name))

    def op_reduce(self) -> None:
        arguments = self.stack.pop()
        if type(arguments) is not tuple:
            msg = "arguments are not a tuple"
            raise TypeError(msg)
        self.stack[-1] = self._made(self.stack[-1], arguments)

    def _made(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        cost = _OBJECT_BYTES
        if arguments:
            for argument in arguments:
                kind = type(argument)
                if kind in _SIZED:
                    self.copied += len(argument)
                    cost += len(argument) * (1 if kind in {str, bytes} else _ELEMENT_BYTES)
            if self.copied > _COPIED_MIN + 2 * len(self.data):
                msg = "the same values are copied again and again"
                raise ValueError(msg)
        self.pay(cost)
        return expect(function, Global).make(*arguments)

    def op_newobj_ex(self) -> None:
        keywords = self.stack.pop()
        if keywords:
            msg = "an object is made with keyword arguments"
            raise ValueError(msg)
        self.op_reduce()

    def op_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Opaque:
            target.state = state
        elif type(target) is Array:
            self.stack[-1] = target.with_state(state)
            self._replace(target, self.stack[-1])
        elif type(target) is Global:
            msg = "a class is changed"
            raise TypeError(msg)
        # Attributes of a container or tensor (``_metadata`` of a state_dict) are dropped.

    def _replace(self, old: Array, new: Any) -> None:
        """Replace ``old`` in the memo, where a recent opcode put it."""
        for _, key in zip(range(64), reversed(self.memo), strict=False):
            if self.memo[key] is old:
                self.memo[key] = new
                return

    def op_persistent(self) -> None:
        if self.persistent is None:
            msg = "it refers to data outside of it"
            raise ValueError(msg)
        self.stack[-1] = self.persistent(self.stack[-1])


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _filled(target: Any, items: list[Any]) -> dict[Any, Any]:
    mapping: dict[Any, Any] = expect(target, dict)
    if len(items) % 2:
        msg = "a key has no value"
        raise ValueError(msg)
    for index in range(0, len(items), 2):
        key = items[index]
        if type(key) is not str:
            check_key(key)
        mapping[key] = items[index + 1]
    return mapping


#: Sequences that are read in one step, half of all opcodes in DCP's metadata. After a class and an
#: empty tuple: NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK, a new object and the dict of its attributes.
#: After two numbers and TUPLE2: MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE, a shape.
_NEW_OBJECT = b"\x81\x94}\x94("
_CALL_WITH = b"\x94\x85\x94R\x94"
_STOP, _MEMOIZE, _BINGET, _LONG_BINGET, _BININT1, _BININT2 = b".\x94hjKM"
_CODES: dict[bytes, Callable[[_Machine], object]] = {
    # Frame, mark, stack, memo.
    b"\x80": _Machine.op_proto,
    b"\x95": lambda m: m.number(_UINT64),
    b"(": _Machine.op_mark,
    b"0": lambda m: m.stack.pop(),
    b"1": _Machine.items,
    b"2": _Machine.op_dup,
    b"q": _Machine.op_binput,
    b"r": _Machine.op_long_binput,
    # Plain values.
    b"N": lambda m: m.stack.append(None),
    b"\x88": lambda m: m.stack.append(True),
    b"\x89": lambda m: m.stack.append(False),
    b"J": lambda m: m.stack.append(m.number(_INT32)),
    b"\x8a": lambda m: m.stack.append(_integer(m.take(m.number(_BYTE)))),
    b"\x8b": _Machine.op_long4,
    b"G": lambda m: m.stack.append(m.number(_FLOAT64)),
    b"\x8c": _Machine.op_short_text,
    b"X": _Machine.op_text,
    b"\x8d": lambda m: m.stack.append(m.text(m.number(_UINT64))),
    b"C": lambda m: m.stack.append(m.take(m.number(_BYTE))),
    b"B": lambda m: m.stack.append(m.take(m.number(_UINT32))),
    b"\x8e": lambda m: m.stack.append(m.take(m.number(_UINT64))),
    b"\x96": lambda m: m.stack.append(m.take(m.number(_UINT64))),
    # Containers.
    b"]": lambda m: m.stack.append([]),
    b")": _Machine.op_empty_tuple,
    b"}": lambda m: m.stack.append({}),
    b"\x8f": lambda m: m.stack.append(set()),
    b"l": _Machine.op_list,
    b"t": lambda m: m.stack.append(tuple(m.items())),
    b"\x85": lambda m: m.stack.append((m.stack.pop(),)),
    b"\x86": _Machine.op_tuple2,
    b"\x87": _Machine.op_tuple3,
    b"d": _Machine.op_dict,
    b"\x91": lambda m: m.stack.append(frozenset(m.keys())),
    b"a": lambda m: expect(m.stack[-2], list).append(m.stack.pop()),
    b"e": _Machine.op_appends,
    b"s": _Machine.op_setitem,
    b"u": _Machine.op_setitems,
    b"\x90": _Machine.op_additems,
    # Names and objects.
    b"c": _Machine.op_global,
    b"\x93": _Machine.op_stack_global,
    b"R": _Machine.op_reduce,
    b"\x81": _Machine.op_reduce,
    b"\x92": _Machine.op_newobj_ex,
    b"b": _Machine.op_build,
    b"Q": _Machine.op_persistent,
}
_TABLE: list[Callable[[_Machine], object] | None] = [
    _CODES.get(bytes([code])) for code in range(256)
]
