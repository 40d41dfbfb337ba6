"""Recognise temporary errors of file systems and services, and retry.

Clients wrap one another and raise at every layer. Errors are classified by the answer they carry
and by the names of their classes, so no client has to be installed.
"""

import errno
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ucp_core.errors import StorageError

T = TypeVar("T")

#: A file server that restarted or moved what a handle named, a signal, a busy resource.
_ERRNOS = {errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.EBUSY}
#: HTTP statuses and codes of S3.
_CODES = {
    *("408", "429", "500", "502", "503", "504"),
    "InternalError",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "XAmzContentSHA256Mismatch",
}
#: Broken connections in botocore, aiohttp and requests, including subclasses. A throttling
#: answer that is not XML is a ResponseParserError.
_CLASSES = {
    "ChunkedEncodingError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "HTTPClientError",
    "IncompleteRead",
    "ResponseParserError",
    "TimeoutError",
}
#: A separate generator: a thread that stores must not draw the script's random numbers.
_JITTER = random.Random()  # noqa: S311  no secrets here


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How to retry after a temporary failure.

    Pauses double from ``first_s`` to ``longest_s``; each is shortened at random by up to half, so
    that ranks do not return at the same instant. With the defaults, tries last 17 to 33 seconds.
    """

    attempts: int = 9
    first_s: float = 0.2
    longest_s: float = 8.0

    def call(self, act: Callable[[], T]) -> T:
        """Return what ``act`` returns; raise its last error.

        Args:
            act: It may take effect and still fail, so it must be safe to repeat.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return act()
            except StorageError:
                raise
            except Exception as error:
                if attempt == self.attempts or not passes(error):
                    raise
            pause_s = min(self.first_s * 2 ** (attempt - 1), self.longest_s)
            time.sleep(pause_s * _JITTER.uniform(0.5, 1.0))
        raise AssertionError("attempts is at least 1")


#: A mount answers within a second, or its client has waited for it already.
_MOUNTED = Retries(attempts=7, first_s=0.01, longest_s=0.5)


def retried(act: Callable[[], T]) -> T:
    """Return what ``act`` on files returns; retry while its error is temporary.

    Args:
        act: Must be safe to repeat: never an append, or an exclusive creation.
    """
    return _MOUNTED.call(act)


def passes(error: BaseException) -> bool:
    """Return whether the same call may succeed a moment later."""
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    return bool(codes(error) & _CODES or classes(error) & _CLASSES)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def codes(error: BaseException) -> set[str]:
    """Return the service's codes, such as ``NoSuchBucket`` or ``503``."""
    found: set[str] = set()
    for each in _chain(error):
        response: Any = getattr(each, "response", None)
        if isinstance(response, dict):
            found.add(str(response.get("Error", {}).get("Code")))
            found.add(str(response.get("ResponseMetadata", {}).get("HTTPStatusCode")))
        for name in ("code", "status"):
            found.add(str(getattr(each, name, None)))
    return found


def classes(error: BaseException) -> set[str]:
    """Return the names of the error's classes and those of its causes."""
    return {kind.__name__ for each in _chain(error) for kind in type(each).__mro__}
