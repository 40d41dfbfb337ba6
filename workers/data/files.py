"""Finds and reads the files of a dataset, and keeps arrays computed from them."""

import fnmatch
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ucp_core.errors import UcpError
from ucp_core.storage import Stamp, Store, open_store
from workers.errors import DataError

Arrays: TypeAlias = dict[str, NDArray[Any]]
#: Number and size of the pieces that identify a file that is not read whole.
_NUM_PIECES: Final = 32
_PIECE_BYTES: Final = 32 << 10


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a dataset, local or behind a URL."""

    url: str  #: The URL or path as the user would name it.
    store: Store
    path: str
    stamp: Stamp  #: The file's size and identity when the dataset was opened.

    @property
    def size_bytes(self) -> int:
        """Return the file's size when the dataset was opened."""
        return self.stamp.size_bytes

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Return bytes of the file."""
        try:
            return self.store.read_range(self.path, offset_bytes, size_bytes)
        except UcpError as error:
            raise DataError(f"{self.url} cannot be read: {error}", path=self.url) from error

    def content(self) -> str:
        """Return an identity of the file's content that is the same on every machine.

        It is the storage's own identifier, or a digest of the whole file or of pieces spread over
        it.
        """
        if self.stamp.is_of_content:
            return self.stamp.text
        last = max(0, self.size_bytes - _PIECE_BYTES)
        starts = sorted({last * number // (_NUM_PIECES - 1) for number in range(_NUM_PIECES)})
        if self.size_bytes <= _NUM_PIECES * _PIECE_BYTES:
            starts = list(range(0, self.size_bytes, _PIECE_BYTES))
        digest = hashlib.sha256()
        for start in starts:
            digest.update(self.read(start, min(_PIECE_BYTES, self.size_bytes - start)))
        return digest.hexdigest()

    def open(self) -> Any:
        """Return a Python file object for libraries that need one."""
        return io.BufferedReader(_Raw(self), buffer_size=self.store.request_bytes)


class _Raw(io.RawIOBase):
    """Reads ranges of a store as a file."""

    def __init__(self, file: DataFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size_bytes}
        self._at = base[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), max(0, self._file.size_bytes - self._at))
        buffer[:size] = self._file.read(self._at, size)
        self._at += size
        return size


def find_files(what: str, paths: str | Path | Sequence[str | Path]) -> tuple[DataFile, ...]:
    """Return the files that paths, URLs and globs name, in order; sort the files of a glob by name.

    ``what`` names the caller in the error, which names every path without a file.
    """
    found: list[DataFile] = []
    problems: list[str] = []
    for one in [paths] if isinstance(paths, str | Path) else paths:
        url = str(one)
        try:
            is_glob = bool(set(url) & set("*?["))
            urls = sorted(glob_files(url)) if is_glob else [url]
            found += [_file(each) for each in urls]
            problems += [] if urls else [f"{url} matches no file"]
        except (UcpError, OSError) as error:
            problems.append(f"{url} cannot be read: {error}")
    if not found and not problems:
        problems.append("no path was given")
    if problems:
        raise DataError(f"{what}: {'; '.join(problems)}", problems=problems)
    return tuple(found)


def glob_files(pattern: str) -> list[str]:
    """Return the files that a glob matches; only the last part of a URL may have wildcards."""
    if "://" not in pattern:
        root = Path(pattern).anchor
        paths = Path(root or ".").glob(pattern.removeprefix(root))
        return [str(path) for path in paths if path.is_file()]
    directory, _, last = pattern.rpartition("/")
    store, at = open_store(directory)
    return [f"{directory}/{name}" for name in store.list(at) if fnmatch.fnmatch(name, last)]


def _file(url: str) -> DataFile:
    store, path = open_store(url)
    return DataFile(url, store, path, store.stamp(path))


def cached_arrays(
    depends: Mapping[str, Any],
    cache: str | None,
    make: Callable[[], Arrays],
    *,
    setting: str = "cache=",
) -> Arrays:
    """Return arrays that ``make`` computes once for all processes of a machine.

    Several processes may make them at the same time. ``depends`` has everything on which the arrays
    depend, as JSON values. ``cache`` is a local directory; the default is one for this user among
    the temporary files. Messages call it ``setting``.
    """
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]
    # In a container a user may have no name.
    root = cache or f"{tempfile.gettempdir()}/everstep-data-{os.getuid()}"
    directory = Path(root) / key
    done = directory / "names.json"
    try:
        if not done.exists():
            directory.mkdir(parents=True, exist_ok=True)
            arrays = make()
            for name, array in arrays.items():
                temporary = directory / f"{name}.{os.getpid()}.temporary.npy"
                np.save(temporary, array)
                temporary.replace(directory / f"{name}.npy")
            temporary = directory / f"names.{os.getpid()}.temporary"
            temporary.write_text(json.dumps(sorted(arrays)))
            temporary.replace(done)
        names: list[str] = json.loads(done.read_text())
        return {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in names}
    except OSError as error:
        raise DataError(
            f"cannot keep what was computed from the data in {directory}: {error}; set {setting} "
            "to a directory that can be written",
            path=str(directory),
        ) from error
