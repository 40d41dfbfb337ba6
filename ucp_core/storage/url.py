"""Which store serves a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ucp_core.errors import StorageError
from ucp_core.storage.local import LocalStore

if TYPE_CHECKING:
    from ucp_core.storage.base import Store


def open_store(url: str) -> tuple[Store, str]:
    """Return the store that serves ``url``, and the path of ``url`` in that store.

    A path without a scheme, or with ``file://``, is a local one; anything else is fsspec's
    (``s3://bucket/key``, ``gs://...``, ``memory://...``). Local paths come back absolute.

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

    from ucp_core.storage.fsspec_store import FsspecStore

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise StorageError(f"{url} cannot be opened: {error}", url=url) from error
    return FsspecStore(filesystem), str(path)
