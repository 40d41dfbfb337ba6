"""Spoils a checkpoint of any format in one of many ways, by a seed.

A mutation changes a copy of the folder. Where a format has checksums that an editor would set right
(the directory of a zip, the seal of a manifest), so do the mutations that edit pickles and JSON.
"""

import io
import json
import os
import pickletools
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.hostile_pickles import dumps, payloads
from ucp_core.numerics import crc32

_NUMBERS = (0, -1, 1, 3, 2**31, 2**62, 2**64, 10**30, float("nan"), 1e308)
_TRIES = 100
_JSON_SUFFIXES = (".json",)
_ZIP_SUFFIXES = (".pt", ".bin", ".pth")


class Mutated(NamedTuple):
    """A mutation that was done."""

    kind: str  #: One of ``KINDS``.
    told: str  #: To whom, for a person.


def mutate(folder: Path, rng: random.Random, outside: Path, kind: str = "") -> Mutated:
    """Change one thing in ``folder``."""
    for _ in range(_TRIES):
        chosen = kind or rng.choice(sorted(KINDS))
        told = KINDS[chosen](folder, rng, outside)
        if told:
            return Mutated(chosen, told)
    return Mutated(kind, "nothing, because no file is of that kind")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _some(
    folder: Path, rng: random.Random, suffixes: tuple[str, ...] = (), name: str = ""
) -> Path | None:
    found = [p for p in _files(folder) if not suffixes or p.suffix in suffixes]
    found = [p for p in found if name in p.name] or found
    return rng.choice(found) if found else None


def _flip(folder: Path, rng: random.Random, outside: Path) -> str:
    del outside
    path = rng.choice(_files(folder))
    data = bytearray(path.read_bytes())
    if not data:
        return ""
    places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 1, 2, 5)))]
    for place in places:
        data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"{path.name} at {places}"


def _overwrite(folder: Path, rng: random.Random, outside: Path) -> str:
    del outside
    path = rng.choice(_files(folder))
    data = bytearray(path.read_bytes())
    if len(data) < 2:
        return ""
    low = rng.randrange(len(data))
    size = min(rng.choice((1, 8, 512, 4096)), len(data) - low)
    data[low : low + size] = bytes(size) if rng.random() < 0.5 else rng.randbytes(size)
    path.write_bytes(data)
    return f"{path.name} at {low}, {size} bytes"


def _resize(folder: Path, rng: random.Random, outside: Path) -> str:
    del outside
    path = rng.choice(_files(folder))
    size = path.stat().st_size
    new = rng.choice((0, 1, size // 2, max(0, size - 1), rng.randrange(size + 1), size + 1))
    if new > size:
        path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice((1, 64, 5000))))
    else:
        os.truncate(path, new)
    return f"{path.name} from {size} to {path.stat().st_size}"


def _two_of_a_kind(folder: Path, rng: random.Random) -> tuple[Path, Path] | None:
    one = rng.choice(_files(folder))
    others = [p for p in _files(folder) if p.suffix == one.suffix and p != one]
    return (one, rng.choice(others)) if others else None


def _swap(folder: Path, rng: random.Random, outside: Path) -> str:
    del outside
    pair = _two_of_a_kind(folder, rng)
    if pair is None:
        return ""
    one, other = pair
    if one.read_bytes() == other.read_bytes():
        return ""
    kept = one.with_name(one.name + "-kept")
    one.rename(kept)
    other.rename(one)
    kept.rename(other)
    return f"{one.relative_to(folder)} and {other.relative_to(folder)}"


def _copy_over(folder: Path, rng: random.Random, outside: Path) -> str:
    del outside
    pair = _two_of_a_kind(folder, rng)
    if pair is None:
        return ""
    one, other = pair
    shutil.copy(one, other)
    return f"{one.relative_to(folder)} over {other.relative_to(folder)}"


def _add_file(folder: Path, rng: random.Random, outside: Path) -> str:
    del outside
    path = rng.choice(_files(folder))
    digits = [i for i, letter in enumerate(path.name) if letter.isdigit()]
    if not digits:
        return ""
    place = rng.choice(digits)
    name = f"{path.name[:place]}{rng.randrange(10)}{path.name[place + 1 :]}"
    if path.with_name(name).exists():
        return ""
    shutil.copy(path, path.with_name(name))
    return f"{path.name} as {name}"


def _delete(folder: Path, rng: random.Random, outside: Path) -> str:
    del outside
    path = rng.choice(_files(folder))
    path.unlink()
    return str(path.relative_to(folder))


def _rename(folder: Path, rng: random.Random, outside: Path) -> str:
    told = _add_file(folder, rng, outside)
    if told:
        next(p for p in _files(folder) if p.name == told.split(" as ")[0]).unlink()
    return told


def _no_file(folder: Path, rng: random.Random, outside: Path) -> str:
    path = rng.choice(_files(folder))
    kind = rng.choice(("link out", "link to a copy outside", "loop", "device", "pipe", "folder"))
    if kind == "link to a copy outside":
        shutil.copy(path, outside / "secret")
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "device":
            path.symlink_to(rng.choice(("/dev/zero", "/dev/random", "/dev/full")))
        case _:
            path.symlink_to(outside / "secret")
    return f"{path.relative_to(folder)}: {kind}"


def _link_folder(folder: Path, rng: random.Random, outside: Path) -> str:
    """Move a folder out and leave a link to it."""
    folders = sorted(path for path in folder.rglob("*") if path.is_dir())
    if not folders:
        return ""
    path = rng.choice(folders)
    shutil.move(path, outside / "secret-folder")
    path.symlink_to(outside / "secret-folder")
    return str(path.relative_to(folder))


def _edit_text(folder: Path, rng: random.Random, outside: Path) -> str:
    small = [p for p in _files(folder) if p.stat().st_size < 64]
    if not small:
        return ""
    path = rng.choice(small)
    text = rng.choice(("..", "../..", str(outside), "", "\0", "x" * 5000, "7", " \n", "é", "-1"))
    path.write_text(text)
    return f"{path.name} is {text[:20]!r}"


def _edit_json(folder: Path, rng: random.Random, outside: Path) -> str:
    path = _some(folder, rng, _JSON_SUFFIXES)
    if path is None:
        return ""
    text = path.read_bytes()
    try:
        document = json.loads(text)
    except ValueError:
        return ""
    told = _edit_value(document, rng, outside)
    if isinstance(document, dict) and "crc32" in document:
        document.pop("crc32")
        body = json.dumps(document).encode()[:-1]
        path.write_bytes(body + b',"crc32":"%08x"}\n' % crc32(body))
    else:
        path.write_text(json.dumps(document))
    return told and f"{path.name}: {told}"


def _edit_header(folder: Path, rng: random.Random, outside: Path) -> str:
    """Edit the JSON of a safetensors file; the data stay."""
    path = _some(folder, rng, (".safetensors",))
    if path is None:
        return ""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + length])
    told = _edit_value(document, rng, outside)
    text = json.dumps(document).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return told and f"{path.name}: {told}"


def places(document: Any) -> list[tuple[Any, Any]]:
    """Return every dict and list of a document with each of its keys, or indexes."""
    found: list[tuple[Any, Any]] = []
    queue = [document] if isinstance(document, dict | list) else []
    while queue:
        value = queue.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value))
        found += [(value, key) for key in keys]
        queue += [value[key] for key in keys if isinstance(value[key], dict | list)]
    return found


def _edit_value(document: Any, rng: random.Random, outside: Path) -> str:
    """Change one member somewhere in a document."""
    found = places(document)
    if not found:
        return ""
    holder, key = rng.choice(found)
    old = holder[key]
    match rng.choice(("delete", "number", "swap", "text", "rename", "nest")):
        case "delete":
            del holder[key]
            return f"{key} deleted"
        case "number":
            holder[key] = rng.choice(_NUMBERS)
        case "swap":
            other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key], holder[other] = holder[other], holder[key]
            return f"{key} and {other} swapped"
        case "text":
            holder[key] = rng.choice(("", "../secret", str(outside / "secret"), "F16", "x" * 999))
        case "rename" if isinstance(holder, dict):
            holder[rng.choice((f"{key}x", "../x", ""))] = holder.pop(key)
            return f"{key} renamed"
        case _:
            holder[key] = [old, {"x": old}]
    return f"{key} is {str(holder[key])[:40]}, was {str(old)[:40]}"


def _edit_pickle(folder: Path, rng: random.Random, outside: Path) -> str:
    """Edit an operation of a pickle."""
    return _with_pickle(folder, rng, lambda data: _edited_pickle(data, rng, outside))


def _with_pickle(
    folder: Path, rng: random.Random, edit: Callable[[bytes], tuple[bytes, str]], like: str = ""
) -> str:
    """Edit a pickle; the checksums of its zip are those of the new content."""
    path = _some(folder, rng, (*_ZIP_SUFFIXES, ".metadata", ""), like)
    if path is None:
        return ""
    data = path.read_bytes()
    if not zipfile.is_zipfile(io.BytesIO(data)):
        if not data.startswith(b"\x80"):
            return ""
        new, told = edit(data)
        path.write_bytes(new)
        return told and f"{path.name}: {told}"
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        pickled = [name for name in names if name.endswith("data.pkl")]
        if not pickled:
            return ""
        new, told = edit(archive.read(pickled[0]))
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as made:
            for name in names:
                made.writestr(name, new if name == pickled[0] else archive.read(name))
    path.write_bytes(out.getvalue())
    return told and f"{path.relative_to(folder)}: {told}"


def _edited_pickle(data: bytes, rng: random.Random, outside: Path) -> tuple[bytes, str]:
    if rng.random() < 0.1:
        name, payload = rng.choice(sorted(payloads(outside / "ran").items()))
        return dumps({"module": payload}), f"payload {name}"
    found = list(pickletools.genops(data))
    ends = [place for _, _, place in found[1:]] + [len(data)]
    ops = [(op, arg, data[low:high]) for (op, arg, low), high in zip(found, ends, strict=True)]
    numbers = [i for i, (op, arg, _) in enumerate(ops) if _is_number(op.name, arg)]
    texts = [i for i, (op, _, _) in enumerate(ops) if "UNICODE" in op.name]
    kind = rng.choice(("number", "number", "neighbour", "text", "swap", "drop", "twice", "payload"))
    if kind in {"number", "neighbour"} and numbers:
        place = rng.choice(numbers)
        old = int(str(ops[place][1]))
        new = rng.choice((old + 1, old - 1, 2 * old, old ^ 1))
        value = new if kind == "neighbour" else int(rng.choice(_NUMBERS[:8]))
        changed = {place: _long(value)}
        told = f"{old} is {value}"
    elif kind in {"text", "swap"} and len(texts) > 1:
        one, other = rng.sample(texts, 2)
        changed = {one: ops[other][2]}
        if kind == "swap":
            changed[other] = ops[one][2]
        told = f"{ops[one][1]!r:.60} is {ops[other][1]!r:.60}, {kind}"
    else:
        place = rng.randrange(len(ops))
        payload = b"cposix\nmkdir\nX%b%b\x85R" % (
            len(str(outside / "ran")).to_bytes(4, "little"),
            str(outside / "ran").encode(),
        )
        raw = ops[place][2]
        changed = {place: {"drop": b"", "twice": raw + raw}.get(kind, payload)}
        told = f"{kind} of {ops[place][0].name} {place}"
    return b"".join(changed.get(i, raw) for i, (_, _, raw) in enumerate(ops)), told


def _long(value: int) -> bytes:
    """Return LONG1 with a number."""
    size = value.bit_length() // 8 + 1
    return b"\x8a%c%b" % (size, value.to_bytes(size, "little", signed=True))


def _is_number(name: str, arg: Any) -> bool:
    return type(arg) is int and name in {"BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG"}


def _bomb(name: str) -> Callable[[Path, random.Random, Path], str]:
    """Return a mutation that puts what fills memory, or takes for ever, into a dict of a pickle."""

    def edit(data: bytes, rng: random.Random) -> tuple[bytes, str]:
        places = [at or 0 for op, _, at in pickletools.genops(data) if op.name == "EMPTY_DICT"]
        # Newer protocols number what they make, which these numbers would disturb.
        if not places or data[1] != _PROTOCOL:
            return data, ""
        at = rng.choice((places[0], *places[:4])) + 1
        return data[:at] + b"(" + _BOMBS[name]() + b"u" + data[at:], f"{name} at {at}"

    def mutation(folder: Path, rng: random.Random, outside: Path) -> str:
        del outside
        # The others hold hardly more than tensors.
        return _with_pickle(folder, rng, lambda data: edit(data, rng), "model_")

    return mutation


def _put(number: int) -> bytes:
    return b"r" + (_FIRST_FREE + number).to_bytes(4, "little")


def _get(number: int) -> bytes:
    return b"j" + (_FIRST_FREE + number).to_bytes(4, "little")


def _key(name: str) -> bytes:
    return b"X" + len(name).to_bytes(4, "little") + name.encode()


def _many_keys() -> bytes:
    """A megabyte 60 times under each of ten keys."""
    text = _key("x" * (1 << 20)) + _put(0) + b"0"
    return text + b"".join(_key(f"k{i}") + b"(" + _get(0) * 60 + b"l" for i in range(10))


def _large_integers() -> bytes:
    """An integer of 4,290 digits, 200,000 times."""
    data = (10**4289).to_bytes(1782, "little")
    number = b"\x8b" + len(data).to_bytes(4, "little") + data + _put(0) + b"0"
    return number + _key("n") + b"(" + _get(0) * 200_000 + b"l"


def _nested() -> bytes:
    """A dict that is twice in each of 64 dicts above it: 2**64 ways lead to it."""
    made = b"}" + _put(0) + b"0"
    for i in range(64):
        made += b"}(" + _key("a") + _get(i) + _key("b") + _get(i) + b"u" + _put(i + 1) + b"0"
    return made + _key("evil") + _get(64)


#: No writer numbers so many values; and the protocol in which values are numbered by opcodes.
_FIRST_FREE = 1 << 30
_PROTOCOL = 2
#: Pairs of keys and values, as a pickle has them between MARK and SETITEMS.
_BOMBS: dict[str, Callable[[], bytes]] = {
    "many keys": _many_keys,
    "large integers": _large_integers,
    "shared dicts": _nested,
    # A set takes 216 bytes and one opcode.
    "many objects": lambda: _key("sets") + b"(" + b"\x8f" * 2_000_000 + b"l",
    "large pickle": lambda: _key("text") + _key("x" * (100 << 20)),
}


def _edit_zip(folder: Path, rng: random.Random, outside: Path) -> str:
    """Change a number in the directory at the end of a zip, or a record's name."""
    del outside
    path = _some(folder, rng, (*_ZIP_SUFFIXES, ".distcp"))
    if path is None:
        return ""
    data = bytearray(path.read_bytes())
    place = data.rfind(b"PK\x01\x02") if rng.random() < 0.7 else data.rfind(b"PK\x05\x06")
    if place < 0:
        return ""
    at = place + rng.randrange(4, 46)
    if at + 4 > len(data):
        return ""
    value = rng.choice((0, 1, 0xFFFF, 0xFFFFFFFF, rng.randrange(1 << 32)))
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    return f"{path.name}: 4 bytes at {at - place} of a record are {value:x}"


BOMBS = tuple(_BOMBS)
#: By name; each returns "" if the folder has nothing of that kind.
KINDS: dict[str, Callable[[Path, random.Random, Path], str]] = {
    "flip": _flip,
    "overwrite": _overwrite,
    "resize": _resize,
    "swap": _swap,
    "copy over": _copy_over,
    "add": _add_file,
    "delete": _delete,
    "rename": _rename,
    "no file": _no_file,
    "link folder": _link_folder,
    "edit text": _edit_text,
    "edit json": _edit_json,
    "edit header": _edit_header,
    "edit pickle": _edit_pickle,
    "edit zip": _edit_zip,
    **{name: _bomb(name) for name in _BOMBS},
}
