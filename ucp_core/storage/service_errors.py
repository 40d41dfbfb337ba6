"""Turn errors of a storage service into advice for the user."""

from collections.abc import Callable
from typing import Any, TypeVar

from ucp_core.errors import StorageError
from ucp_core.storage.local import ADVICE
from ucp_core.storage.passing import Retries, classes, codes, passes

T = TypeVar("T")

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


def request(retries: Retries, path: str, act: Callable[[], T], *, needs_bucket: bool = False) -> T:
    """Return what ``act`` returns; raise a ``StorageError`` about ``path`` if it fails.

    Args:
        retries: How to retry ``act``.
        path: The path that ``act`` reads or writes.
        act: One request; it may take effect and still fail.
        needs_bucket: ``act`` writes, so a missing thing can only be the bucket.
    """
    try:
        return retries.call(act)
    except StorageError:
        raise
    except Exception as error:
        raise _described(error, path, retries.attempts, needs_bucket=needs_bucket) from error


def _is_forbidden(error: Exception) -> bool:
    """Return whether this is gcsfs's error for a refused request, by its text."""
    return isinstance(error, OSError) and str(error).startswith("Forbidden: ")


def _described(error: Exception, path: str, attempts: int, *, needs_bucket: bool) -> StorageError:
    """Return a StorageError that says what ``error`` means for ``path``."""
    said_codes, kinds = codes(error), classes(error)
    facts: dict[str, Any] = {"path": path, "missing": False}
    said = " ".join(str(error).split())
    if "NoSuchBucket" in said_codes or (needs_bucket and isinstance(error, FileNotFoundError)):
        what = "is in a bucket that does not exist: create the bucket or correct the URL"
    elif isinstance(error, FileNotFoundError) or said_codes & _MISSING_CODES:
        what, facts["missing"] = "does not exist", True
    elif isinstance(error, FileExistsError) or said_codes & _TAKEN_CODES:
        what, facts["taken"] = "exists already", True
    elif said_codes & _CREDENTIALS_CODES or kinds & _CREDENTIALS_CLASSES:
        what = (
            f"cannot be reached with these credentials ({said}): check the access key, secret, "
            "profile or service account of this process, their expiry, and the clock"
        )
    elif isinstance(error, PermissionError) or "403" in said_codes or _is_forbidden(error):
        what = (
            f"is not permitted ({said}): these credentials are known but may not do this; check "
            "the bucket's policy and the role's rights"
        )
    elif said_codes & {"416", "InvalidRange"}:
        what, facts["truncated"] = "ends before the requested bytes: truncated", True
    elif passes(error):
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
