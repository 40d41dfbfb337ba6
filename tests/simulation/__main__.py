"""``python -m tests.simulation``: simulate many histories, or show one."""

import argparse
import json
import sys
from collections.abc import Sequence

from orchestrator.core import RunState
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from tests.simulation.campaign import Campaign, run_campaign
from tests.simulation.history import History
from tests.simulation.scenario import one_line, phase_line
from tests.simulation.violation import Violation


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every promise held."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description="Simulate runs with faults."
    )
    parser.add_argument("--histories", type=_positive, default=2000, help="how many seeds in a row")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--faults", type=int, default=None, help="with --show: only so many")
    parser.add_argument("--show", action="store_true", help="print one history, event by event")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if options.show:
        return _show(options.seed, options.faults)
    seeds = range(options.seed, options.seed + options.histories)
    campaign = run_campaign(seeds, progress=None if options.json else _progress)
    if options.json:
        sys.stdout.write(json.dumps(campaign.to_json()) + "\n")
    else:
        sys.stdout.write(_report(campaign))
    return 1 if campaign.failures else 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1 history, or nothing is checked")
    return number


def _progress(campaign: Campaign) -> None:
    if sys.stderr.isatty() and campaign.num_histories % 500 == 0:
        sys.stderr.write(f"\r{campaign.num_histories} histories")
        sys.stderr.flush()


def _report(campaign: Campaign) -> str:
    sums = (
        f"{campaign.num_histories} histories, {campaign.num_events} events, "
        f"{campaign.num_attempts} attempts, {campaign.num_faults} faults, "
        f"{campaign.virtual_s / 3600:.1f} virtual hours, {len(campaign.failures)} violations"
    )
    lines = [sums]
    for failure in campaign.failures:
        lines += [f"seed {failure.seed}: {failure.violation}", f"  {failure.command}"]
    return "\n".join(lines) + "\n"


def _show(seed: int, fault_limit: int | None) -> int:
    def show(event: ev.Event, state: RunState, actions: Sequence[act.Action]) -> None:
        sys.stdout.write(f"{event.at_s:.3f} {one_line(event)}\n")
        for action in actions:
            sys.stdout.write(f"  {one_line(action)}\n")
        sys.stdout.write(f"  {phase_line(state)}\n")

    try:
        History(seed, fault_limit=fault_limit, observe=show).run()
    except Violation as violation:
        sys.stdout.write(f"violation: {violation}\n")
        return 1
    sys.stdout.write("every promise held\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
