"""The store through which the members of an attempt find each other.

It runs beside the controller, outside every member, so it survives the death of any rank, rank 0
included. Each attempt gets its own server, so that nothing of an old attempt can reach a new one.

The servers are torch's, so they run in a separate process: importing torch takes seconds and blocks
its process for one of them. The next server is created in advance: if no name server answers, torch
takes as long to look up the name for its first connection.

This file is also the program of that process, which ends with the controller.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

#: How long a client waits for a key. The fence ends the wait much earlier.
CLIENT_TIMEOUT = timedelta(seconds=120)

_THREAD: Final = ThreadPoolExecutor(1, thread_name_prefix="rendezvous")


class Rendezvous:
    """Serves one store for each attempt; the last one stays up until the next is requested."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._process: subprocess.Popen[str] | None = None
        self._next: asyncio.Future[int] | None = None

    def prepare(self) -> None:
        """Begin to create the store that ``open`` returns next. Call it on the loop."""
        if self._next is None:
            self._next = asyncio.get_running_loop().run_in_executor(_THREAD, self._make)

    async def open(self) -> tuple[str, int]:
        """Return the host and port of a fresh store, to which members connect."""
        if self._process is not None and self._process.poll() is not None:
            self._next = None  # It ended with its process.
        self.prepare()
        coming, self._next = self._next, None
        self.prepare()
        assert coming is not None
        return self._host, await coming

    def _make(self) -> int:
        """Have the process create one more store; return its port."""
        process = self._process
        if process is None or process.poll() is not None:
            if process is not None:
                process.communicate()  # Close the pipes to it.
            # The kernel closes the pipe when this process ends, and the child ends at the end of
            # its input.
            process = self._process = subprocess.Popen(  # noqa: S603  our own file
                [sys.executable, "-P", __file__, self._host],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return int(process.stdout.readline())


def _serve(host: str) -> None:
    """Create a store for each line of input, and write its port. The last two stay up."""
    from torch.distributed import TCPStore

    stores: deque[Any] = deque(maxlen=2)
    for _ in sys.stdin:
        stores.append(
            TCPStore(host, 0, None, is_master=True, wait_for_workers=False, timeout=CLIENT_TIMEOUT)
        )
        print(stores[-1].port, flush=True)  # noqa: T201  to the controller


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # The controller has ended meanwhile.
        _serve(sys.argv[1])
