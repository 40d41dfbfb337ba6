"""The errors that a collective can raise.

GroupError
+ AbortedError      the orchestrator aborted the attempt; no rank has to be at fault
+ CollectiveError   the transport failed: a hint that a peer died, but no proof of which one
"""

import re
from collections.abc import Iterator
from typing import Final

from ucp_core.errors import FactsError

#: Errors of gloo (torch 2.13) and NCCL (2.27, ``src/misc/socket.cc``) for a connection that could
#: not be made, or that ended because the peer did not answer.
_REMOTE: Final = re.compile(
    r"(?:remote=|peer )\[(?:::ffff:)?([0-9a-fA-F.:]+)\]|[Cc]onnect to ([0-9a-fA-F.:]+)<\d+>"
)
_UNREACHED: Final = re.compile(
    r"connectFullMesh|[Cc]onnect timeout|[Tt]imed out|No route to host|unreachable"
)


class GroupError(FactsError):
    """Base of the errors that the recorded process groups raise on purpose."""


class AbortedError(GroupError):
    """The attempt was aborted from outside.

    Facts: ``attempt``, and ``op`` if a collective was called.
    """


class CollectiveError(GroupError):
    """gloo or NCCL failed under a collective. Facts: ``attempt``, ``group``, ``op``, ``seq``."""


def unreached(error: BaseException) -> str:
    """Return the address of the peer that gloo or NCCL could not reach; "" if the error names none.

    A peer that closed its connection was reachable, so it is not returned.
    """
    for said in map(str, causes(error)):
        named = _REMOTE.search(said)
        if named is not None and _UNREACHED.search(said) and "closed by peer" not in said:
            return named[1] or named[2]
    return ""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
