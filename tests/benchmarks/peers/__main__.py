"""Peers beside everstep: one trainer, one injector, one log, one table.

    python -m tests.benchmarks peers                                  # all of it: hours
    python -m tests.benchmarks peers --arms bare everstep torchrun --faults none kill --runs 2
    python -m tests.benchmarks peers --table --json                   # of what has run so far

Four workers on two simulated nodes train the same decoder on the same data with the same global
batch, each arm as its own documentation says (``peers/<arm>/``), each in its own environment
(``make bench-peers`` makes them). Faults come from outside, some in each run, each once all
workers train again. A cell is an arm and a fault; what has run is kept in ``--directory`` as JSON
lines and is not run again, so the command can be given again after an interruption, or with more
``--runs``.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.benchmarks.common import commit, load_average
from tests.benchmarks.peers.events import Outside, read
from tests.benchmarks.peers.injector import FAULTS, NOT_RUN, Injector
from tests.benchmarks.peers.processes import REPOSITORY, Arm, Job, arms
from tests.benchmarks.peers.table import as_text, count_lines, fault_rows, seen, step_rows

DIRECTORY: Final = REPOSITORY / "build" / "peers"
LINES: Final = "lines.jsonl"


def main() -> int:
    """Run the cells that are wanted and missing, and print the table of all."""
    every = arms()
    arguments = parse(every)
    # Ended by a signal or by an error, what was started is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = [every[name] for name in arguments.arms]
    versions = {arm.name: arm.version() for arm in chosen}
    for arm, fault, number in [] if arguments.table else cells(chosen, arguments):
        folder = arguments.directory / arm.name / fault / str(number)
        if (folder / LINES).exists() and not arguments.again:
            continue
        if not versions[arm.name]:
            raise SystemExit(f"{arm.package}: not installed for {arm.name}; run `make bench-peers`")
        began_s = time.monotonic()
        play(arm, fault, number, folder, versions[arm.name], arguments)
        took_s = time.monotonic() - began_s
        say(f"{arm.name}, {fault}, run {number}: {took_s:.0f} s, load {load_average()[0]}")
    show(every, arguments)
    return 0


def parse(every: dict[str, Arm]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks peers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--arms", nargs="+", choices=every, default=list(every), metavar="ARM",
                        help=f"of {', '.join(every)}")  # fmt: skip
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS),
                        metavar="FAULT", help=f"of {', '.join(FAULTS)}")  # fmt: skip
    parser.add_argument("--runs", type=int, default=2, help="jobs of each cell (2)")
    parser.add_argument("--each", type=int, default=5, help="faults in a job, at most (5)")
    parser.add_argument("--steps", type=int, default=300, help="of a job without a fault (300)")
    parser.add_argument("--limit", type=float, default=60.0,
                        help="seconds after which a fault counts as not survived (60)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of victims and delays (0)")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="of the raw lines")
    parser.add_argument("--again", action="store_true", help="run what has run, too")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--json", action="store_true", help="one line")
    return parser.parse_args()


def cells(chosen: list[Arm], arguments: argparse.Namespace) -> Iterator[tuple[Arm, str, int]]:
    """Yield arm, fault and number of each job, arms in turn, so that drift falls on all."""
    for number in range(arguments.runs):
        for fault in arguments.faults:
            for arm in chosen:
                if not arm.skipped and fault not in NOT_RUN and fault in (arm.faults or FAULTS):
                    yield arm, fault, number


def play(
    arm: Arm, fault: str, number: int, folder: Path, version: str, arguments: argparse.Namespace
) -> None:
    """Run one job and keep its lines."""
    job = Job(arm, folder.resolve())
    outside = Outside(job.events)
    outside.write(
        "run", arm=arm.name, version=version, fault=fault, number=number, seed=arguments.seed,
        limit_s=arguments.limit, commit=commit(), load=load_average()[0],
    )  # fmt: skip
    try:
        Injector(
            job, outside, seed=arguments.seed + number, steps=arguments.steps,
            faults=arguments.each, limit_s=arguments.limit,
        ).play(fault)  # fmt: skip
    finally:
        job.end()
        outside.close()
    lines = read(job.events)
    if not any(line["event"] == "committed" for line in lines):
        raise SystemExit(f"{arm.name} did no step; its logs are in {folder}")
    part = folder / (LINES + ".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part.rename(folder / LINES)


def show(every: dict[str, Arm], arguments: argparse.Namespace) -> None:
    """Print the table of all that has run so far."""
    paths = sorted(arguments.directory.glob(f"*/*/*/{LINES}"))
    jobs = [seen(map(json.loads, path.read_text().splitlines())) for path in paths]
    lines = {arm.name: count_lines(arm.script.read_text()) for arm in every.values()
             if arm.script.exists()}  # fmt: skip
    steps, faults = step_rows(jobs, lines), fault_rows(jobs)
    not_run = {arm.name: arm.skipped for arm in every.values() if arm.skipped} | NOT_RUN
    if arguments.json:
        print(json.dumps({"steps": steps, "faults": faults, "not_run": not_run}))
        return
    print(as_text(steps), as_text(faults), sep="\n\n")
    for name, why in not_run.items():
        print(f"\n{name}: {why}")


def say(text: str) -> None:
    """Show progress, apart from the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
