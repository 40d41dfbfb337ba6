"""Which store serves a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ucp_core.errors import StorageError
from ucp_core.storage.local import LocalStore

if TYPE_CHECKING:
    from ucp_core.storage.base import Store

#: The extra of everstep that installs the client of a scheme.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def open_store(url: str) -> tuple[Store, str]:
    """Return the store that serves ``url``, and the path of ``url`` in that store.

    A path without a scheme, or with ``file://``, is local and comes back absolute; fsspec handles
    everything else (``s3://bucket/key``, ``gs://...``, ``memory://...``). Credentials, region and
    endpoint come from where the service's own tools find them (``AWS_PROFILE``,
    ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``, ...) or from fsspec's configuration.

    Raises:
        StorageError: The scheme is unknown, or its package is not installed.
    """
    if not url:
        raise StorageError("the URL is empty: give a directory or a URL such as s3://bucket/run")
    scheme, _, rest = url.partition("://")
    if not rest or scheme == "file":
        path = unquote(urlsplit(url).path) if scheme == "file" else url
        return LocalStore(), str(Path(path).expanduser().absolute())
    # fsspec takes 40 ms to import, and local runs never need it.
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url, **_options(scheme))
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(scheme)
        advice = f"; pip install 'everstep[{extra}]'" if extra else ""
        raise StorageError(f"{url} cannot be opened: {error}{advice}", url=url) from error
    return _store_of(scheme, filesystem), str(path).rstrip("/")


def _options(scheme: str) -> dict[str, Any]:
    """Return options for the client; the user's own fsspec configuration stays."""
    import fsspec

    if scheme not in _EXTRAS:
        return {}
    # A cached listing would hide what another process committed.
    options: dict[str, Any] = {"use_listings_cache": False}
    if _EXTRAS[scheme] == "s3":
        # Retry in one place only: three layers of retries would wait for many minutes.
        configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}} | configured
    return options


def _store_of(scheme: str, filesystem: Any) -> Store:
    from ucp_core.storage.passing import Retries
    from ucp_core.storage.remote import FsspecStore
    from ucp_core.storage.s3 import S3Store

    if _EXTRAS.get(scheme) == "s3":
        filesystem.retries = 1
        return S3Store(filesystem)
    if _EXTRAS.get(scheme) == "gcs":
        # gcsfs retries by itself for a minute.
        return FsspecStore(filesystem, retries=Retries(attempts=1))
    return FsspecStore(filesystem)
