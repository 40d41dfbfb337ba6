"""Commands of several ranks, forked from one process that has imported what they need.

A rank that imports torch and DeepSpeed itself takes seconds of a processor for it, and does its
work in a fraction of one. Every rank is a process of its own all the same: what a library keeps
in globals ends with it. The environment of a rank is that which torchrun gives.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

ROOT = Path(__file__).parents[2]
#: Length of the end of a failed command's output to show.
SHOWN_CHARACTERS = 8000


class ForkedCommands:
    """Runs commands one after the other; to be used in a ``with`` statement.

    Args:
        imports: Modules that are imported once, before any command.
        log: Gets what commands print.
    """

    def __init__(self, imports: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            # A group of its own: what still runs at the end is ended with it.
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked_commands", *imports],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The server is not reaped yet, so its group is still its own.
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()

    def run(self, module: str, arguments: Sequence[str], *, num_ranks: int = 1) -> None:
        """Run ``python -m MODULE ARGUMENTS`` as ``num_ranks`` ranks; raise unless all succeed."""
        from torch.distributed import TCPStore

        printed = self._log.stat().st_size
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        order = {
            "module": module,
            "arguments": list(arguments),
            "num_ranks": num_ranks,
            "port": store.port,
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        output = self._log.read_bytes()[printed:].decode(errors="replace")
        assert answer == "done\n", f"{module} failed: {answer}{output[-SHOWN_CHARACTERS:]}"


def serve(imports: Sequence[str], orders: IO[str], answers: IO[str]) -> None:
    """Run what is ordered, line by line, until there are no more orders."""
    # The first optimizer imports torch._dynamo: a second of a processor in each rank.
    for module in (*imports, "torch._dynamo"):
        __import__(module)
    # No rank's collector goes through what all of them share, which would copy its pages.
    gc.freeze()
    for line in orders:
        order = json.loads(line)
        ranks = [_fork(order, rank) for rank in range(order["num_ranks"])]
        failed = False
        while ranks:
            pid, status = os.wait()
            ranks.remove(pid)
            if status and not failed:
                failed = True
                # The others would wait for it.
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
        answers.write("failed\n" if failed else "done\n")
        answers.flush()


def _fork(order: dict[str, Any], rank: int) -> int:
    """Return the id of a process that runs the command and ends."""
    if pid := os.fork():
        return pid
    try:
        world_size = str(order["num_ranks"])
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(order["port"]),
            # The ordering process has the store: no rank has to find a free port.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        sys.argv = [order["module"], *order["arguments"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    except BaseException:  # noqa: BLE001  the edge of a process
        traceback.print_exc()
        os._exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    # The output of commands goes to the log, so that answers stand alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1:], sys.stdin, answers)
