"""Puts the files of a DeepSpeed checkpoint into a store: all of them and then ``latest``, or none.

It overwrites nothing, and a failure leaves nothing behind.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed.writing.trees import DEEPSPEED_NAMES
from ucp_core.native import refuse_taken
from ucp_core.storage import Buffer, Store, join, undone
from ucp_core.torch_files import TensorData, write_torch_file

_TAG = re.compile(r"[^/\\\x00-\x1f]+")


def write_files(
    store: Store,
    directory: str,
    tag: str,
    files: Callable[[], Iterable[tuple[str, Any]]],
    *,
    latest: str,
    progress: Callable[[int, int], None] | None,
    fsync: bool,
) -> None:
    """Write every file that ``files`` gives to ``directory/tag``, and then the file ``latest``.

    ``files`` yields names and trees; it is called twice if progress needs sizes. If the destination
    is in use, or reading or writing fails, no part of this checkpoint is left.
    """
    if _TAG.fullmatch(tag) is None or tag in {".", ".."}:
        raise UcpError(f"tag={tag!r} is not the name of a folder")
    refuse_taken(directory, store.list(directory))
    done_bytes = total_bytes = 0
    if progress is not None:
        for _, tree in files():
            # Each tensor of a file counts once.
            tensors: dict[int, TensorData] = {}
            _mapped(tree, lambda tensor: tensor, tensors)
            total_bytes += sum(tensor.num_bytes for tensor in tensors.values())

    def chunks(tensor: TensorData) -> Iterator[Buffer]:
        nonlocal done_bytes
        for chunk in tensor.chunks():
            yield chunk
            done_bytes += memoryview(chunk).nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)

    def counted(tensor: TensorData) -> TensorData:
        return TensorData(tensor.dtype, tensor.shape, lambda: chunks(tensor))

    folder = join(directory, tag)
    with undone(store, directory) as written:
        # A user can load a folder without ``latest`` by its tag.
        written.append(folder)
        for name, tree in files():
            own = _mapped(tree, counted, {})
            write_torch_file(store, join(folder, name), own, allow=DEEPSPEED_NAMES, fsync=fsync)
        written.append(join(directory, latest))
        store.write_atomic(written[-1], tag.encode(), fsync=True)


def _mapped(
    tree: Any, change: Callable[[TensorData], TensorData], known: dict[int, TensorData]
) -> Any:
    """Return a tree with other tensors; ``known`` gets them by the identity of the old ones."""
    if isinstance(tree, TensorData):
        return known.get(id(tree)) or known.setdefault(id(tree), change(tree))
    if isinstance(tree, dict):
        return type(tree)((key, _mapped(value, change, known)) for key, value in tree.items())
    return [_mapped(value, change, known) for value in tree] if type(tree) is list else tree
