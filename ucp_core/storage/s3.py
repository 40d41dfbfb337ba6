"""S3 and compatible services: large files are uploaded in parts, several in parallel."""

from __future__ import annotations

import io
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ucp_core.errors import StorageError
from ucp_core.storage.remote import FsspecStore
from ucp_core.storage.service_errors import request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucp_core.storage.base import Buffer

#: S3 takes 10,000 parts and files of 5 TiB, so the part size doubles after every 2,000 parts. Up to
#: 31 GiB all parts have the same size, as some services require.
_PART_BYTES = 16 << 20
_PARTS_OF_ONE_SIZE = 2000
_PARTS_AT_ONCE = 6


class S3Store(FsspecStore):
    """Files of a bucket, through s3fs; a file appears once it is complete.

    A killed writer leaves the parts that it sent, invisible but billed. The bucket's rule
    ``AbortIncompleteMultipartUpload`` removes them.
    """

    _refuses_itself = True

    def read(self, path: str) -> bytes:
        """Return the whole file with one request: s3fs would ask for the size first."""
        data: bytes = request(
            self._retries, path, lambda: self._fs.cat_file(path, max_concurrency=1)
        )
        return data

    def write_file(self, path: str, chunks: Iterable[Buffer], *, fsync: bool) -> int:
        """Write ``chunks`` in order and return the total size."""
        del fsync
        bucket, key, _ = self._fs.split_path(path)
        names = {"Bucket": bucket, "Key": key}
        pending = _Body()
        upload: _Upload | None = None
        size_bytes = 0
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                size_bytes += len(view)
                while view:
                    room = (upload.part_bytes if upload else _PART_BYTES) - pending.tell()
                    pending.write(view[:room])
                    view = view[room:]
                    if view:
                        upload = upload or _Upload(self, path, names)
                        upload.part(pending)
                        pending = _Body()
            if upload is None:
                self.request(path, "put_object", names, pending)
            else:
                upload.part(pending)
                upload.complete(size_bytes)
        except BaseException:
            if upload is not None:
                upload.abort()
            raise
        self._fs.invalidate_cache(path)
        return size_bytes

    def request(
        self, path: str, method: str, arguments: Mapping[str, Any], body: _Body | None = None
    ) -> dict[str, Any]:
        """Make a request that writes, with retries."""

        def act() -> dict[str, Any]:
            given = {}
            if body is not None:
                body.seek(0)
                given = {"Body": body}
            answer: dict[str, Any] = self._fs.call_s3(method, **arguments, **given)
            return answer

        return self._call(path, act)


class _Body(io.BytesIO):
    """The body of a request. Plain bytes would be copied and sent in one call."""

    def close(self) -> None:
        """Stay open: the client closes a body after sending it, but a retry sends it again."""


class _Upload:
    """A multipart upload: parts are sent while the next ones are filled."""

    def __init__(self, store: S3Store, path: str, names: dict[str, Any]) -> None:
        self._store = store
        self._path = path
        answer = store.request(path, "create_multipart_upload", names)
        self._names: dict[str, Any] = names | {"UploadId": answer["UploadId"]}
        self._pool = ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="s3-upload")
        self._under_way: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []
        self._num_parts = 0

    @property
    def part_bytes(self) -> int:
        """Return the size of the next part."""
        return _PART_BYTES << (self._num_parts // _PARTS_OF_ONE_SIZE)

    def part(self, data: _Body) -> None:
        """Send a part; wait if too many are being sent."""
        self._num_parts += 1
        self._under_way.append(self._pool.submit(self._send, self._num_parts, data))
        while len(self._under_way) >= _PARTS_AT_ONCE:
            self._parts.append(self._under_way.popleft().result())

    def _send(self, number: int, data: _Body) -> dict[str, Any]:
        answer = self._store.request(
            self._path, "upload_part", self._names | {"PartNumber": number}, data
        )
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def complete(self, size_bytes: int) -> None:
        """Make the file appear."""
        self._parts += [future.result() for future in self._under_way]
        self._pool.shutdown()
        try:
            self._store.request(
                self._path,
                "complete_multipart_upload",
                self._names | {"MultipartUpload": {"Parts": self._parts}},
            )
        except StorageError:
            # If only the answer was lost, the upload is complete and the retry does not know it.
            if not self._is_complete(size_bytes):
                raise

    def _is_complete(self, size_bytes: int) -> bool:
        names = {name: self._names[name] for name in ("Bucket", "Key")}
        try:
            found = self._store.request(self._path, "head_object", names)
        except StorageError:
            return False
        is_of_parts = str(found["ETag"]).strip('"').endswith(f"-{len(self._parts)}")
        return is_of_parts and found["ContentLength"] == size_bytes

    def abort(self) -> None:
        """Drop the parts that were sent; keep the error that led here."""
        self._pool.shutdown(cancel_futures=True)
        with suppress(StorageError):
            self._store.request(self._path, "abort_multipart_upload", self._names)
