"""Processes forked from a server that has imported torch, transformers and what trains on them.

Each would need seconds of a processor for these imports, and there are hundreds of them.
"""

import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from workers.launchers import take_place

#: Guards against a hang; some seconds on an idle machine.
SECONDS_MAX = 240.0
#: Missing packages are left out.
_IMPORTS = [
    "tests.support.trainers",
    "tests.support.doomed",
    "everstep.integrations.transformers",
    "transformers.models.llama.modeling_llama",
]


def forking() -> ForkServerContext:
    """Return how processes are made; the server starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    return context


def run_script(
    script: Path,
    directory: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Be ``python SCRIPT ARGUMENTS`` in ``directory``; return what it printed, without an error."""
    process = _begin(script, directory, arguments, environment or {}, "printed")
    process.join(SECONDS_MAX)
    printed = (directory / "printed").read_text()
    assert process.exitcode == 0, printed
    return printed


def begin_ranks(
    script: Path, directory: Path, num_ranks: int, port: int, *arguments: str
) -> list[ForkServerProcess]:
    """Start ranks of a script as torchrun does; the caller has the store at ``port``."""
    place = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return [
        _begin(script, directory, arguments, {**place, "RANK": rank, "LOCAL_RANK": rank}, rank)
        for rank in map(str, range(num_ranks))
    ]


def _begin(
    script: Path,
    directory: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    printed: str,
) -> ForkServerProcess:
    words = [str(script), *arguments]
    process = forking().Process(target=_run, args=(words, str(directory), environment, printed))
    process.start()
    return process


def _run(words: Sequence[str], directory: str, environment: Mapping[str, str], name: str) -> None:
    os.chdir(directory)
    sys.argv = [*words]
    os.environ |= environment
    # The server looked when it imported what trains.
    take_place.cache_clear()
    with Path(name).open("w") as printed, redirect_stdout(printed), redirect_stderr(printed):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except BaseException:
            traceback.print_exc()
            raise
