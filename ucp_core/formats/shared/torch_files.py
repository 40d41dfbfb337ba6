"""Opens the torch files of one folder in parallel, because each needs its own requests."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ucp_core.formats.refusals import corrupt
from ucp_core.geometry import Extent
from ucp_core.storage import Store, join
from ucp_core.torch_files import TorchFile, current_budget, read_torch_file, use_budget

_T = TypeVar("_T")

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
        found = in_parallel(lambda name: self._read(name, kinds), wanted)
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


def in_parallel(read: Callable[[str], _T], names: Sequence[str]) -> list[_T]:
    """Return what ``read`` returns for each name; threads use the caller's memory budget."""
    if len(names) <= 1:
        return list(map(read, names))
    threads, budget = min(THREADS_MAX, len(names)), (current_budget(),)
    with ThreadPoolExecutor(threads, "ucp-read", use_budget, budget) as pool:
        return list(pool.map(read, names))
