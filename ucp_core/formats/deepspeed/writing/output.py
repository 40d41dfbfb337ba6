"""Puts the files of a DeepSpeed checkpoint into a store: all of them and then ``latest``, or none.

It overwrites nothing, and a failure leaves nothing behind.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed.writing.trees import DEEPSPEED_NAMES
from ucp_core.native import refuse_taken
from ucp_core.storage import join, undone
from ucp_core.torch_files import TensorData, write_torch_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ucp_core.storage import Buffer, Store

_TAG = re.compile(r"[^/\\\x00-\x1f]+")


class Output:
    """A checkpoint to write: ``directory/TAG`` and the file in ``directory`` that names it."""

    def __init__(
        self,
        store: Store,
        directory: str,
        tag: str,
        progress: Callable[[int, int], None] | None,
        *,
        fsync: bool,
    ) -> None:
        if _TAG.fullmatch(tag) is None or tag in {".", ".."}:
            raise UcpError(f"tag={tag!r} is not the name of a folder")
        self._store = store
        self._directory = directory
        self._tag = tag
        self._progress = progress
        self._fsync = fsync
        self._done_bytes = 0
        self._total_bytes = 0

    def write(self, files: Callable[[], Iterable[tuple[str, Any]]], *, latest: str) -> None:
        """Write every file that ``files`` gives, and ``latest`` last.

        Args:
            files: Yields names below the tag with their trees. Called twice if progress needs the
                sizes.
            latest: Name of the file that commits the checkpoint.

        Raises:
            UcpError: The destination is in use, or reading or writing failed. No part of this
                checkpoint is left.
        """
        refuse_taken(self._directory, self._store.list(self._directory))
        if self._progress is not None:
            for _, tree in files():
                # Each tensor of a file counts once.
                tensors = {id(tensor): tensor for tensor in _tensors(tree)}
                self._total_bytes += sum(tensor.num_bytes for tensor in tensors.values())
        folder = join(self._directory, self._tag)
        with undone(self._store, self._directory) as written:
            # A user can load a folder without ``latest`` by its tag.
            written.append(folder)
            for name, tree in files():
                counted = self._counted(tree, {}) if self._progress is not None else tree
                path = join(folder, name)
                write_torch_file(
                    self._store, path, counted, allow=DEEPSPEED_NAMES, fsync=self._fsync
                )
            written.append(join(self._directory, latest))
            self._store.write_atomic(written[-1], self._tag.encode(), fsync=True)

    def _counted(self, tree: Any, known: dict[int, TensorData]) -> Any:
        """Return the tree with tensors that report progress."""
        if isinstance(tree, TensorData):
            if id(tree) not in known:
                known[id(tree)] = TensorData(tree.dtype, tree.shape, lambda: self._chunks(tree))
            return known[id(tree)]
        if isinstance(tree, dict):
            return type(tree)((key, self._counted(value, known)) for key, value in tree.items())
        if type(tree) is list:
            return [self._counted(value, known) for value in tree]
        return tree

    def _chunks(self, tensor: TensorData) -> Iterator[Buffer]:
        for chunk in tensor.chunks():
            yield chunk
            self._done_bytes += memoryview(chunk).nbytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)


def _tensors(tree: Any) -> Iterator[TensorData]:
    if isinstance(tree, TensorData):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif type(tree) is list:
        for value in tree:
            yield from _tensors(value)
