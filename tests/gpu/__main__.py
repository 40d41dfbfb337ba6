"""Run the parts, one after the other, and print one table; see ``tests.gpu``."""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch

from tests.gpu.parts import PARTS, Lab, perform
from tests.gpu.rows import Row

ROOT: Final = Path(__file__).parents[2]
#: Each group of parts has a process of its own, one after the other: the ranks of all take turns on
#: the GPU, and two groups at a time slow each other down so much that waits run out. The first ones
#: are worth most when time is short.
GROUPS: Final = (
    ("card",),
    ("groups",),
    ("kills",),
    ("equal",),
    ("layouts",),
    ("snapshot", "pinning"),
    ("faults",),
    ("overhead",),
    ("diagnosis",),
    ("tests",),
    ("demo",),
    ("models",),
)
#: Those of one rank, which has all processors; several ranks have one each.
ALONE: Final = frozenset({"snapshot", "pinning", "overhead", "models"})
#: Those that only run when they are named.
EXTRA: Final = frozenset({"demo", "models"})
#: A part that takes longer has failed.
PART_S_MAX: Final = 300.0
#: The same with whole settings.
FULL_S_MAX: Final = 600.0
#: How long parts that were not named may take together.
ALL_S_MAX: Final = 300.0


def main() -> int:
    """Run what was asked for; return 1 if a row is not as it is to be, or a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", help=f"of {', '.join(PARTS)}; default: what fits five minutes"
    )
    parser.add_argument("--on-cpu", action="store_true", help="stand-ins without a GPU")
    parser.add_argument("--full", action="store_true", help="every part with its whole settings")
    parser.add_argument("--json", action="store_true", help="rows as JSON, a line each")
    parser.add_argument("--logs", type=Path, help="folder that keeps run directories and output")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.here:
        perform(options.parts, Lab(options.on_cpu, options.full, options.logs))
        return 0
    if not options.on_cpu and not torch.cuda.is_available():
        print("skipped: torch sees no GPU on this machine; --on-cpu runs stand-ins")  # noqa: T201
        return 0
    chosen = options.parts or [part for part in PARTS if options.full or part not in EXTRA]
    is_limited = not (options.parts or options.full)
    until_s = time.monotonic() + ALL_S_MAX if is_limited else math.inf
    # A command that is ended ends its parts, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for group in GROUPS:
            parts = [part for part in group if part in chosen]
            if not parts:
                continue
            if time.monotonic() >= until_s:
                rows.append(_shown(_itself(parts, "", is_over=True), as_json=options.json))
                continue
            process = _Process(parts, options, logs, until_s)
            try:
                rows += process.rows()
            finally:
                process.end()
    if not options.json:
        print_table(rows)
    return int(any(row.ok is False for row in rows))


class _Process:
    """Parts that run in a process of their own, one after the other."""

    def __init__(
        self, parts: Sequence[str], options: argparse.Namespace, logs: Path, until_s: float
    ) -> None:
        self._parts, self._as_json, self._all_until_s = parts, options.json, until_s
        command = [sys.executable, "-m", "tests.gpu", "--here", *parts]
        for flag in ("--on-cpu", "--full"):
            command += [flag] if getattr(options, flag[2:].replace("-", "_")) else []
        command += ["--logs", str(options.logs)] if options.logs else []
        self._log = logs / f"gpu-{'-'.join(parts)}.log"
        found = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        places = os.pathsep.join([str(ROOT), str(ROOT / "workers/public"), *found])
        threads = str(max(1, (os.cpu_count() or 1) // 2)) if ALONE.issuperset(parts) else "1"
        limit_s = len(parts) * (FULL_S_MAX if options.full else PART_S_MAX)
        limit_s *= 3 if options.on_cpu else 1
        self._until_s = min(until_s, time.monotonic() + limit_s)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": threads},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def rows(self) -> list[Row]:
        """Return what the parts tell until they end; print it as it comes."""
        rows: list[Row] = []
        timer = threading.Timer(max(1.0, self._until_s - time.monotonic()), self.end)
        timer.start()
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._log.open("a") as log:
                    log.write(line)
                if (row := Row.of(line)) is not None:
                    rows.append(_shown(row, as_json=self._as_json))
        timer.cancel()
        if self._process.wait():
            said = self._log.read_text(errors="replace").strip().splitlines()
            last = next((line for line in reversed(said) if Row.of(line) is None), "nothing")
            seen = f"ended with {self._process.returncode}: {last[:200]}"
            is_over = time.monotonic() >= self._all_until_s
            rows.append(_shown(_itself(self._parts, seen, is_over=is_over), as_json=self._as_json))
        return rows

    def end(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _itself(parts: Sequence[str], seen: str, *, is_over: bool) -> Row:
    """Return the row of parts that did not end by themselves."""
    what, part = "the part itself", "/".join(parts)
    if is_over:
        return Row(part=part, what=what, seen="skipped: no time is left; name it to run it")
    return Row(part=part, what=what, seen=seen, bar="ends", ok=False)


def _shown(row: Row, *, as_json: bool) -> Row:
    """Return the row, printed."""
    line = f"{row.part}: {row.what}: {row.seen}"
    print(json.dumps(asdict(row)) if as_json else line, flush=True)  # noqa: T201
    return row


def print_table(rows: Sequence[Row]) -> None:
    """Print all rows as a table of Markdown, which RESULTS.md takes as it is."""
    print("\n| part | what | seen | to be | |\n|---|---|---|---|---|")  # noqa: T201
    for row in rows:
        verdict = {True: "ok", False: "**missed**", None: ""}[row.ok]
        print(f"| {row.part} | {row.what} | {row.seen} | {row.bar} | {verdict} |")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
