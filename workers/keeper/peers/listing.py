"""What a keeper tells its peers of the memory it holds, and what it looks like on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from workers.keeper.peers.frames import fields_of, held_of
from workers.protocol import Held

__all__ = ["Listed", "Listing", "agree", "copy_name", "is_copy", "listing_of"]

_COPY_MARK: Final = "/"
_NODE_CHARS: Final = 12


def copy_name(node: str, arena: str) -> str:
    """Return the name under which the versions of ``arena`` of another node are held here."""
    return f"{node[:_NODE_CHARS]}{_COPY_MARK}{arena}"


def is_copy(arena: str) -> bool:
    """Return whether an arena of this name holds what another node's rank wrote."""
    return _COPY_MARK in arena


@dataclass(frozen=True, slots=True)
class Listed:
    """An arena of a peer.

    Attributes:
        body_bytes: What a slot of it can hold.
        parts: Its complete versions, oldest first.
        kept: Attempt and step of the one that all ranks and all their peers have.
    """

    body_bytes: int
    parts: tuple[Held, ...]
    kept: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a peer's own ranks have written.

    Attributes:
        news: To be given as ``after`` next time.
        arenas: By name.
    """

    news: int
    arenas: Mapping[str, Listed]

    def to_json(self) -> dict[str, Any]:
        """Return what ``listing_of`` reads."""
        return {
            "news": self.news,
            "arenas": {
                name: {
                    "body_bytes": arena.body_bytes,
                    "parts": list(map(fields_of, arena.parts)),
                    "kept": arena.kept,
                }
                for name, arena in self.arenas.items()
            },
        }


def listing_of(answer: Any) -> Listing:
    """Return the listing that a JSON object says.

    Raises:
        KeyError, TypeError, ValueError: It says none.
    """
    return Listing(
        news=int(answer["news"]),
        arenas={
            name: Listed(
                body_bytes=int(listed["body_bytes"]),
                parts=tuple(held_of(part) for part in listed["parts"]),
                kept=_version_of(listed["kept"]),
            )
            for name, listed in answer["arenas"].items()
        },
    )


def agree(versions: Mapping[str, Sequence[Held]]) -> bool:
    """Return whether the newest versions of all ranks are of one step."""
    return len({(held[-1].attempt, held[-1].step) for held in versions.values() if held}) <= 1


def _version_of(answer: Any) -> tuple[int, int] | None:
    if answer is None:
        return None
    attempt, step = map(int, answer)
    return attempt, step
