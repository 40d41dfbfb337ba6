"""Errors of a storage service: which requests to retry, and what to tell the user.

Clients wrap one another and raise at every layer. Errors are classified by the answer that they
carry and by the names of their classes, so no client has to be installed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ucp_core.errors import StorageError
from ucp_core.storage.local import ADVICE

T = TypeVar("T")

#: HTTP statuses and codes of S3.
_TRANSIENT_CODES = {
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
#: Broken connections in botocore, aiohttp and requests; subclasses count too. A throttled answer
#: that is not XML is a ResponseParserError.
_TRANSIENT_CLASSES = {
    "ChunkedEncodingError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "HTTPClientError",
    "IncompleteRead",
    "ResponseParserError",
    "TimeoutError",
}
_CREDENTIALS_CODES = {
    "401",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_CREDENTIALS_CLASSES = {
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "RefreshError",
    "SSOError",
}
_TAKEN_CODES = {"412", "ConditionalRequestConflict", "PreconditionFailed"}
_MISSING_CODES = {"404", "NoSuchKey"}
#: A generator of its own: a thread that stores takes none of the script's random numbers.
_JITTER = random.Random()  # noqa: S311  no secrets here


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How to retry a request that failed for a transient reason.

    Pauses double from ``first_s`` to ``longest_s``; each is shortened at random by up to half, so
    that ranks do not return at the same instant. The defaults give a service 17 to 33 seconds.
    """

    attempts: int = 9
    first_s: float = 0.2
    longest_s: float = 8.0

    def call(self, path: str, act: Callable[[], T], *, needs_bucket: bool = False) -> T:
        """Return what ``act`` returns; raise a ``StorageError`` about ``path`` if it cannot.

        Args:
            path: The path that ``act`` reads or writes.
            act: One request; it may take effect and fail all the same.
            needs_bucket: ``act`` writes, so a missing thing can only be the bucket.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return act()
            except StorageError:
                raise
            except Exception as error:
                if attempt == self.attempts or not _is_transient(error):
                    raise _described(error, path, attempt, needs_bucket=needs_bucket) from error
            pause_s = min(self.first_s * 2 ** (attempt - 1), self.longest_s)
            time.sleep(pause_s * _JITTER.uniform(0.5, 1.0))
        raise AssertionError("attempts is at least 1")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _codes(error: BaseException) -> set[str]:
    """Return the service's codes: ``NoSuchBucket``, ``503``."""
    found: set[str] = set()
    for each in _chain(error):
        response: Any = getattr(each, "response", None)
        if isinstance(response, dict):
            found.add(str(response.get("Error", {}).get("Code")))
            found.add(str(response.get("ResponseMetadata", {}).get("HTTPStatusCode")))
        for name in ("code", "status"):
            found.add(str(getattr(each, name, None)))
    return found


def _classes(error: BaseException) -> set[str]:
    return {kind.__name__ for each in _chain(error) for kind in type(each).__mro__}


def _is_forbidden(error: Exception) -> bool:
    """Return whether this is gcsfs's error for a refused request: only its text says so."""
    return isinstance(error, OSError) and str(error).startswith("Forbidden: ")


def _is_transient(error: Exception) -> bool:
    return bool(_codes(error) & _TRANSIENT_CODES or _classes(error) & _TRANSIENT_CLASSES)


def _described(error: Exception, path: str, attempts: int, *, needs_bucket: bool) -> StorageError:
    """Return a StorageError that says what ``error`` means for ``path``."""
    codes, classes = _codes(error), _classes(error)
    facts: dict[str, Any] = {"path": path, "missing": False}
    said = " ".join(str(error).split())
    if "NoSuchBucket" in codes or (needs_bucket and isinstance(error, FileNotFoundError)):
        what = "is in a bucket that does not exist: create the bucket or correct the URL"
    elif isinstance(error, FileNotFoundError) or codes & _MISSING_CODES:
        what, facts["missing"] = "does not exist", True
    elif isinstance(error, FileExistsError) or codes & _TAKEN_CODES:
        what, facts["taken"] = "exists already", True
    elif codes & _CREDENTIALS_CODES or classes & _CREDENTIALS_CLASSES:
        what = (
            f"cannot be reached with these credentials ({said}): check the access key, secret, "
            "profile or service account of this process, their expiry, and the clock"
        )
    elif isinstance(error, PermissionError) or "403" in codes or _is_forbidden(error):
        what = (
            f"is not permitted ({said}): these credentials are known but may not do this; check "
            "the bucket's policy and the role's rights"
        )
    elif codes & {"416", "InvalidRange"}:
        what, facts["truncated"] = "ends before the bytes that were asked for: truncated", True
    elif _is_transient(error):
        what = (
            f"could not be reached in {attempts} attempts, the last one failed with "
            f"{type(error).__name__}: {said}; the service is down, overloaded or not at this "
            "address"
        )
    elif isinstance(error, OSError) and error.errno in ADVICE:
        what = ADVICE[error.errno]
    else:
        what = f"cannot be used: {type(error).__name__}: {said}"
    return StorageError(f"{path} {what}", **facts)
