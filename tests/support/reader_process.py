"""A reader in a process of its own: it opens a checkpoint and stops in the middle of loading.

``python -m tests.support.reader_process DIRECTORY SEED`` prints ``reading`` once it has read a
first piece and goes on when a line comes in; it ends with 0 if every byte was right.
"""

import sys
from collections.abc import Sequence

from tests.support.checkpoints import assert_loaded, small_state, whole_need
from ucp_core.native import load, open_checkpoint
from ucp_core.storage import LocalStore, ReadRange


class _PausingStore(LocalStore):
    """Waits for a line of input after the first read of tensors."""

    paused = False

    def read_ranges(self, path: str, ranges: Sequence[ReadRange]) -> None:
        """Read, and wait once."""
        super().read_ranges(path, ranges)
        if not self.paused:
            self.paused = True
            sys.stdout.write("reading\n")
            sys.stdout.flush()
            sys.stdin.readline()


def main() -> None:
    """Load as told by the arguments."""
    directory, seed = sys.argv[1], int(sys.argv[2])
    state = small_state(seed)
    checkpoint = open_checkpoint(_PausingStore(), directory)
    need = whole_need(state)
    load(checkpoint, need, threads=1)
    assert_loaded(state, need)


if __name__ == "__main__":
    main()
