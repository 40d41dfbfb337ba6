"""Opens the torch files of one folder in parallel, because each needs its own requests."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from ucp_core.formats.refusals import corrupt
from ucp_core.geometry import Extent
from ucp_core.storage import Store, join
from ucp_core.torch_files import TorchFile, current_budget, read_torch_file, use_budget

#: Unpickling holds the interpreter lock, so threads help only while requests wait.
THREADS_MAX = 16


@dataclass(slots=True)
class Files:
    """The open torch files of one folder."""

    store: Store
    directory: str
    trees: dict[str, Any] = field(default_factory=dict)  #: Values by file.
    #: Checksums of storages by file.
    extents: dict[str, tuple[Extent, ...]] = field(default_factory=dict)

    def open(self, names: Iterable[str], *, kinds: tuple[type, ...] = (dict,)) -> None:
        """Read the pickles of more files in parallel, but no tensors."""
        wanted = [name for name in dict.fromkeys(names) if name not in self.trees]
        if len(wanted) <= 1:
            found = [self._read(name, kinds) for name in wanted]
        else:
            with reading_pool(len(wanted)) as pool:
                found = list(pool.map(self._read, wanted, repeat(kinds)))
        for name, file in zip(wanted, found, strict=True):
            self.trees[name] = file.tree
            self.extents[name] = file.extents

    def _read(self, name: str, kinds: tuple[type, ...]) -> TorchFile:
        file = read_torch_file(self.store, self.directory, name)
        if not isinstance(file.tree, kinds):
            raise corrupt(
                self.path(name),
                f"it holds a {type(file.tree).__name__}, not a dict: not a rank's "
                "file of a checkpoint",
            )
        return file

    def path(self, name: str) -> str:
        """Return the path of a file, for errors."""
        return join(self.directory, name)


def reading_pool(num_files: int) -> ThreadPoolExecutor:
    """Return a pool for this many files, whose threads use the caller's memory budget."""
    threads = min(THREADS_MAX, max(1, num_files))
    return ThreadPoolExecutor(threads, initializer=use_budget, initargs=(current_budget(),))
