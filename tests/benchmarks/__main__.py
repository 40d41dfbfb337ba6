"""Every measurement of the README, one process each, so that none warms up another.

python -m tests.benchmarks              # all of them
python -m tests.benchmarks recovery     # those whose name contains the word
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run the modules ``bench_*`` and, after them, the peer; return the first failure's code."""
    folder = Path(__file__).parent
    names = [path.stem for path in sorted(folder.glob("bench_*.py"))] + ["peer_ray_train"]
    words = sys.argv[1:]
    code = 0
    for name in names:
        if words and not any(word in name for word in words):
            continue
        print(f"== {name}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=False)
        code = code or done.returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
