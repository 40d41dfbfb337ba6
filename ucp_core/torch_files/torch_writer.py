"""Write a file that ``torch.load`` reads, without torch and without its tensors in memory.

The tree may hold plain values, ``Size``, tensors (``TensorData``, streamed), and objects of the
allowed foreign classes (``Instance``, ``Named``), which the file names and nothing imports.
"""

from collections.abc import Iterator
from typing import Any

from ucp_core.storage import Buffer, Store
from ucp_core.torch_files.pickle_writer import CORE_NAMES, TensorData, pickle_tree
from ucp_core.torch_files.zip_writer import ALIGNMENT_BYTES, ZipStream

#: The name that torch gives to archives without a file name; readers accept any.
_PREFIX = "archive"


def write_torch_file(
    store: Store,
    path: str,
    tree: Any,
    *,
    allow: frozenset[str] = frozenset(),
    fsync: bool,
) -> int:
    """Write ``tree`` to ``path``, which appears once complete, and return its size."""
    # Like torch: the file's own name is in it, so a reader notices a rename.
    name = path.rpartition("/")[2]
    chunks = torch_file_chunks(tree, allow=allow, name=name.rpartition(".")[0] or name)
    return store.write_file(path, chunks, fsync=fsync)


def torch_file_chunks(
    tree: Any, *, allow: frozenset[str] = frozenset(), name: str = _PREFIX
) -> Iterator[Buffer]:
    """Return the bytes of the file as a stream; raise errors in the tree at once."""
    data, storages = pickle_tree(tree, allow=CORE_NAMES | allow)
    return _chunks(data, storages, name)


def _chunks(data: bytes, storages: list[TensorData], name: str) -> Iterator[Buffer]:
    stream = ZipStream(name)
    head = {
        "data.pkl": data,
        ".format_version": b"1",
        ".storage_alignment": str(ALIGNMENT_BYTES).encode(),
        "byteorder": b"little",
    }
    for record, content in head.items():
        yield from stream.record(record, len(content), (content,))
    for index, tensor in enumerate(storages):
        yield from stream.record(f"data/{index}", tensor.num_bytes, tensor.chunks())
    yield from stream.record("version", 2, (b"3\n",))
    yield from stream.end()
