"""Every benchmark, one process each, so that none warms up another.

python -m tests.benchmarks                          # all of them
python -m tests.benchmarks --quick                  # all, with their smallest settings
python -m tests.benchmarks recovery fleet           # those of these names, or parts of names
python -m tests.benchmarks fleet --nodes 1000       # one of them, with options of its own

Above what each prints stand commit, date, machine and command. ``RESULTS.md`` has the figures.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.benchmarks.common import origin

#: Modules that import a peer, and the package that they need.
PEERS: Final = {"DeepSpeed": "deepspeed"}
#: The smallest settings: they show that a benchmark starts and ends, and their figures say nothing.
QUICK: Final = {
    "bench_checkpoint": "--megabytes 12 --rounds 1",
    "bench_convert": "--gibibytes 0.1 --rounds 1",
    "bench_diagnosis": "--planted 12 --clean 7 --repeats 0",
    "bench_fleet": "--nodes 20 --hours 2 --seconds 2 --histories 20",
    "bench_network": "--only join",
    "bench_overhead": "--models tiny --rounds 2 --seconds 2",
    "bench_planner": "",
    "bench_recheck": "--injected 3 --clean 10 --rounds 1",
    "bench_recovery": "--kills 1 --shrinks 1 --nodes 1",
    "bench_snapshot_gpu": "--rounds 1 --block 2 --gigabytes 1",
    "bench_snapshot_steps": "--states 3 --workers 2 --rounds 1",
    "bench_soak": "--faults 2 --from 0 --local --kinds worker-kill keeper-kill",
    "bench_spot_traces": "--trace p3 --hours 3 3.5",
    "peers": "--arms everstep --faults kill --runs 1 --each 1 --again --directory build/quick",
}


def choose(names: Sequence[str], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return which of ``names`` to run, and the options for it.

    Args:
        names: All benchmarks.
        arguments: Names, with or without "bench_", or parts of names; none for all. From the first
            that begins with a dash on, they are the options of the one benchmark that is named.

    Raises:
        SystemExit: No benchmark has such a name, or more than one is given options.
    """
    num_words = next((n for n, each in enumerate(arguments) if each.startswith("-")), None)
    if num_words is None:
        num_words = len(arguments)
    words, options = arguments[:num_words], list(arguments[num_words:])
    meant = {word: _meant(names, word) for word in words}
    unknown = [word for word, found in meant.items() if not found]
    if unknown:
        raise SystemExit(f"no benchmark has {unknown} in its name; there are {', '.join(names)}")
    chosen = [name for name in names if not words or any(name in found for found in meant.values())]
    if options and len(chosen) != 1:
        raise SystemExit(
            f"{' '.join(options)} are options of one benchmark, and these are meant: "
            f"{', '.join(chosen)}"
        )
    return chosen, options


def _meant(names: Sequence[str], word: str) -> list[str]:
    exact = [name for name in names if name in {word, f"bench_{word}"}]
    return exact or [name for name in names if word in name]


def missing_peers() -> list[str]:
    """Return the peers that are not installed."""
    return [peer for peer, package in PEERS.items() if find_spec(package) is None]


def run(command: Sequence[str]) -> int:
    """Run a benchmark, and end it when this process gets SIGTERM; return its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        finally:
            process.terminate()


def main() -> int:
    """Run the modules ``bench_*`` and, after them, the peers; return 1 if one failed."""
    folder = Path(__file__).parent
    names = [path.stem for path in sorted(folder.glob("bench_*.py"))] + ["peers"]
    arguments = sys.argv[1:]
    is_quick = "--quick" in arguments
    chosen, options = choose(names, [each for each in arguments if each != "--quick"])
    missing = missing_peers()
    if missing and chosen == names:
        raise SystemExit(
            f"{' and '.join(missing)}: not installed, and a table without peers says little; run "
            "`make bench`, or `pip install 'everstep[interop]'`"
        )
    failed: list[str] = []
    for name in chosen:
        given = [*(QUICK[name].split() if is_quick else []), *options]
        print(f"== {origin(' '.join(['python -m tests.benchmarks', name, *given]))}", flush=True)
        command = [sys.executable, "-m", f"tests.benchmarks.{name}", *given]
        if run(command):
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
