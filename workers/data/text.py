"""Finds the documents of a source: the standard library's files, or text and JSON lines by glob.

It determines the documents, their order, and the held-out ones, which must be the same on all
workers of a run.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ucp_core.errors import UcpError
from ucp_core.storage import open_store
from workers.data.files import glob_files
from workers.errors import DataError
from workers.settings import STDLIB, DataSettings

#: Folders below the standard library that differ between machines or belong to other packages.
_EXCLUDED: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "__pycache__", "ensurepip", "idlelib"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """The files to read documents from."""

    described: str  #: The setting and the number of files, for people.
    #: ``(name, path)`` of every file, sorted; ``name`` is relative to the source.
    files: tuple[tuple[str, str], ...]
    text_field: str  #: The field of a JSON line that holds the text.

    def documents(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name and text of every document; a file of JSON lines holds one per line.

        A name is a path in the source, the same on every machine.
        """
        for name, path in self.files:
            content = self._read(path)
            if path.endswith(".jsonl"):
                yield from self._lines(name, path, content)
            elif content:
                yield name, content

    def _read(self, path: str) -> bytes:
        try:
            store, at = open_store(path)
            return store.read(at)
        except (OSError, UcpError) as error:
            raise DataError(f"data.source: {path} cannot be read: {error}", path=path) from error

    def _lines(self, name: str, path: str, content: bytes) -> Iterator[tuple[str, bytes]]:
        for number, line in enumerate(content.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[self.text_field]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"data.source: {path} line {number} is not a JSON object with the field "
                    f"{self.text_field!r}; set data.text_field or fix the line",
                    path=path,
                    line=number,
                ) from error
            if not isinstance(text, str):
                raise DataError(
                    f"data.source: {path} line {number}: {self.text_field!r} is "
                    f"{type(text).__name__}, not text",
                    path=path,
                    line=number,
                )
            yield f"{name}:{number}", text.encode()


def find_source(settings: DataSettings) -> TextSource:
    """Return the files of ``settings.source``."""
    source = settings.source
    if source == STDLIB:
        root = sysconfig.get_path("stdlib")
        paths = list(_walk(root))
    elif "://" in source:
        root = source.rpartition("/")[0]
        try:
            paths = glob_files(source)
        except UcpError as error:
            raise DataError(f"data.source: {root} cannot be listed: {error}") from error
    else:
        root = _fixed_part(source)
        paths = glob_files(source)
    if not paths:
        raise DataError(
            f"data.source: {source!r} matches no file; give 'stdlib', or a glob such as "
            "'/data/**/*.txt'",
            source=source,
        )
    names = sorted((path.removeprefix(root).lstrip("/"), path) for path in paths)
    return TextSource(
        described=f"{source} ({len(names)} files)",
        files=tuple(names),
        text_field=settings.text_field,
    )


def is_held_out(name: str, *, share: float, seed: int) -> bool:
    """Return whether a document is for validation; depends on its name and the seed only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") < share * 2**64


def _walk(root: str) -> Iterator[str]:
    for directory, names, files in os.walk(root):
        # This changes the list in place: ``os.walk`` does not enter removed folders.
        names[:] = [name for name in names if name not in _EXCLUDED]
        yield from (f"{directory}/{name}" for name in files if name.endswith(".py"))


def _fixed_part(pattern: str) -> str:
    parts = pattern.split("/")
    fixed = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts) - 1)
    return "/".join(parts[:fixed]) or ("/" if pattern.startswith("/") else "")
