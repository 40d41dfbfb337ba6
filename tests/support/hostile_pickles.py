"""Pickles that would run a program where a pickle is trusted, and ones that would fill memory."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Payload:
    """Runs a call of ours when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._reduced = (call, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def payloads(marker: Path) -> dict[str, Any]:
    """Return objects of which each makes ``marker`` if anything of it runs."""
    write = f"open({str(marker)!r}, 'w').close()"
    return {
        "system": Payload(os.system, f"touch {marker}"),
        "eval": Payload(eval, write),
        "exec": Payload(exec, write),
        "open": Payload(open, str(marker), "w"),
        "mkdir": Payload(os.mkdir, str(marker)),
        "import": Payload(__import__, "antigravity"),
        "apply": Payload(map, os.mkdir, [str(marker)]),
        "getattr": Payload(getattr, Payload, "system"),
    }


def positions(payload: Any) -> dict[str, Any]:
    """Return values that hold ``payload`` where an unpickler meets it in other ways."""
    return {
        "root": payload,
        "value": {"weight": payload},
        "element": [1, payload],
        "tuple": ("a", payload),
        "deep": {"a": [{"b": ({"c": payload},)}]},
    }


def direct(marker: Path) -> dict[str, bytes]:
    """Return pickles that reach a call by other opcodes than REDUCE of a plain name."""
    path = str(marker).encode()
    return {
        # posix.mkdir(marker) through INST, OBJ, NEWOBJ, BUILD of a class, and attribute paths.
        "inst": b"(X" + len(path).to_bytes(4, "little") + path + b"iposix\nmkdir\n.",
        "obj": b"(cposix\nmkdir\nX" + len(path).to_bytes(4, "little") + path + b"o.",
        "newobj": b"cposix\nmkdir\nX" + len(path).to_bytes(4, "little") + path + b"\x85\x81.",
        "dotted": b"\x80\x04\x8c\x08builtins\x8c\x0e__import__.foo\x93.",
        "attribute": b"cbuiltins\ngetattr\n(cos\npath\nX\x06\x00\x00\x00systemtR.",
        "allowed class, foreign state": (
            b"cargparse\nNamespace\n)\x81}X\x08\x00\x00\x00__dict__cposix\nmkdir\nsb."
        ),
        "build of a class": b"ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.",
        "extension": b"\x82\x01.",
        "persistent": b"X\x01\x00\x00\x00aQ.",
        "call of a value": b"K\x01)R.",
        "call of an object": b"cargparse\nNamespace\n)\x81)R.",
    }


def bombs() -> dict[str, bytes]:
    """Return small pickles that would take all memory or never end."""
    doubling = b")" + b"2\x86" * 64
    return {
        "endless hash": b"}" + doubling + b"Ns.",
        "endless hash in a set": b"\x8f(" + doubling + b"\x90.",
        "deep key": b"}" + b")" + b"\x85" * 300_000 + b"Ns.",
        "deep list": b"]" * 300_000 + b"a" * 299_999 + b".",
        "marks": b"(" * 2_000_000,
        "bytearray": b"cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
        "bytes": b"cbuiltins\nbytes\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
        "announced bytes": b"\x8e" + b"\xff" * 8 + b"a.",
        "announced text": b"X\xff\xff\xff\xffa.",
        "integer": b"\x8b\xff\xff\xff\x7f.",
        "copies": _copies(),
        "array": (
            b"cnumpy.core.numeric\n_frombuffer\n(C\x01acnumpy\ndtype\nX\x02\x00\x00\x00f4\x85R"
            b"(K\x03X\x01\x00\x00\x00<tb\x8a\x06\x00\x00\x00\x00\x00\x01\x85X\x01\x00\x00\x00CtR."
        ),
    }


def harmless() -> dict[str, bytes]:
    """Return pickles of None that ask for memory which a careful reader does not need."""
    return {
        "memo index": b"Nr\xff\xff\xff\x7f.",
        "frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    }


def _copies() -> bytes:
    """A list of 100,000 elements that is copied 100,000 times."""
    big = b"](" + b"N" * 100_000 + b"eq\x00"
    again = b"cbuiltins\nlist\nq\x01](" + b"h\x01h\x00\x85R" * 100_000 + b"e."
    return big + b"0" + again


def torch_zip(data_pickle: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """Return a torch file around a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("archive/data.pkl", data_pickle)
        for name, data in (records or {}).items():
            file.writestr(f"archive/{name}", data)
    return out.getvalue()


def dumps(value: Any, protocol: int = 2) -> bytes:
    """Return the pickle of ``value``."""
    return pickle.dumps(value, protocol)
