"""Every measurement of the README, one process each, so that none warms up another.

python -m tests.benchmarks              # all of them
python -m tests.benchmarks recovery     # those whose name contains the word
python -m tests.benchmarks core --histories 100     # one of them, with options of its own
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def choose(names: Sequence[str], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return which of ``names`` to run, and the options for it.

    Args:
        names: All there are.
        arguments: Parts of names, all if there is none; then, from the first that begins with a
            dash on, the options of the one benchmark that is named.

    Raises:
        SystemExit: Nothing has such a name, or options are given to more than one.
    """
    num_words = next((n for n, each in enumerate(arguments) if each.startswith("-")), None)
    if num_words is None:
        num_words = len(arguments)
    words, options = arguments[:num_words], list(arguments[num_words:])
    unknown = [word for word in words if not any(word in name for name in names)]
    if unknown:
        raise SystemExit(f"no benchmark has {unknown} in its name; there are {', '.join(names)}")
    chosen = [name for name in names if not words or any(word in name for word in words)]
    if options and len(chosen) != 1:
        raise SystemExit(
            f"{' '.join(options)} are options of one benchmark, and these are meant: "
            f"{', '.join(chosen)}"
        )
    return chosen, options


def main() -> int:
    """Run the modules ``bench_*`` and, after them, the peer; return the first failure's code."""
    folder = Path(__file__).parent
    names = [path.stem for path in sorted(folder.glob("bench_*.py"))] + ["peer_ray_train"]
    chosen, options = choose(names, sys.argv[1:])
    code = 0
    for name in chosen:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"tests.benchmarks.{name}", *options]
        done = subprocess.run(command, check=False)
        code = code or done.returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
