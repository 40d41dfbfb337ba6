"""Journal compaction: the state folded up to one record, so that a restart reads only the rest.

The journal stays authoritative. A compaction is used only if it is whole, belongs to this journal
and was made by the same program under the same rules; otherwise the whole journal is folded. Pure;
``orchestrator.shell`` keeps the file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from orchestrator.core.log.codec import decoder, encode
from orchestrator.core.log.journal_lines import Folded
from orchestrator.errors import CompactionError

#: Version of the document's format. Only this one is read.
VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPlace:
    """The end of a record's line in a journal."""

    segment: int  #: Number of the segment, from 1.
    before_bytes: int  #: Size of all segments before it.
    end_bytes: int  #: Size of the segment up to and with the line.
    line: str  #: The record's line. Its ``wall_time`` and ``seq`` make it unique to this journal.

    @property
    def begin_bytes(self) -> int:
        """Return where the line begins in its segment, in bytes."""
        return self.end_bytes - len(self.line)

    @property
    def journal_bytes(self) -> int:
        """Return the size of the journal up to and with the line."""
        return self.before_bytes + self.end_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """A place in a journal, and the folded journal up to it."""

    #: Digest of the inputs of the fold besides the journal: the program, and all ``RunRules``.
    basis: str
    place: JournalPlace
    folded: Folded

    def document(self) -> bytes:
        """Return the compaction as the content of a file."""
        text = json.dumps(encode(self), separators=(",", ":"), allow_nan=False).encode()
        head = {"v": VERSION, "bytes": len(text), "crc32": crc32(text)}
        return json.dumps(head).encode() + b"\n" + text + b"\n"

    @classmethod
    def read(cls, document: bytes, basis: str) -> Compaction:
        """Read a compaction.

        Raise ``CompactionError`` if it is damaged, has another version, or was made on another
        basis.
        """
        head, _, rest = document.partition(b"\n")
        text = rest[:-1]
        try:
            said = json.loads(head)
            if said["v"] != VERSION:
                raise CompactionError(f"its version is {said['v']}, and not {VERSION}")
            if (said["bytes"], said["crc32"]) != (len(text), crc32(text)):
                raise CompactionError("it is not what was written: its checksum differs")
            body = json.loads(text)
            if body["basis"] != basis:
                raise CompactionError(
                    "another version of everstep made it, or the settings were different"
                )
            found: Compaction = _decode(body)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise CompactionError(f"it cannot be read: {type(error).__name__}: {error}") from error
        return found

    def behind(self, segments: Sequence[bytes]) -> list[bytes]:
        """Return the records after this place; ``segments`` begin with its line.

        Raise ``CompactionError`` if they begin with another line, of another journal.
        """
        line = self.place.line.encode()
        if not segments[0].startswith(line):
            found = segments[0][: len(line)]
            raise CompactionError(
                f"segment {self.place.segment} has another line there", found=found
            )
        return [segments[0].removeprefix(line), *segments[1:]]


_decode = decoder(Compaction)
