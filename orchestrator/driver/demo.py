"""``everstep demo``: train the same model twice, undisturbed and with faults."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from orchestrator.config import RunConfig
from orchestrator.driver.cluster import open_cluster
from orchestrator.driver.console import RunView
from orchestrator.driver.faults import kill_node_of, signal_rank, wait_for
from orchestrator.driver.launch import Launched
from orchestrator.driver.run_diff import diff_runs
from orchestrator.errors import ConfigError
from orchestrator.report import read_run, write_report
from ucp_core.numerics import format_bytes
from workers.process import gpus_here

#: A file in each run directory of a demo; the next demo may delete such directories.
_MARK = "made_by_demo"
#: Each recovery must finish within this time.
ACT_S_MAX = 90.0
#: Largest relative difference between losses of a step in runs that sum in different orders.
_APART_MAX = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The result of the demo; ``everstep demo --json`` prints it."""

    undisturbed: dict[str, Any]
    disturbed: dict[str, Any]
    weights_equal: bool
    apart: float  #: The largest relative difference between the losses of a step.
    #: Whether the two runs trained alike: bit for bit if training is deterministic, otherwise with
    #: losses that differ by at most ``_APART_MAX``, because the order of sums differs.
    is_same: bool
    report: str


def layout_overrides(layout: str) -> list[str]:
    """Return the demo's settings for a layout such as ``tp2,pp2``; else raise ``ConfigError``."""
    found = [re.fullmatch(r"(tp|pp)(\d+)", part) for part in layout.split(",")]
    degrees = [f"parallel.{one[1]}={one[2]}" for one in found if one is not None]
    if len(degrees) < len(found):
        raise ConfigError(f"--layout {layout}: write degrees of tp and pp, such as tp2,pp2")
    # Stages share no weights, and the bits of the result depend on the degrees.
    return [*degrees, "model.tied=false", "train.deterministic=false"]


def demo_directories(directory: str) -> list[str]:
    """Make two new run directories, as absolute paths; delete those of an earlier demo.

    Raises:
        ConfigError: Something else is there; nothing was deleted.
    """
    runs = [Path(directory).resolve() / name for name in ("undisturbed", "disturbed")]
    for run in runs:
        is_demo = (run / _MARK).is_file() and not run.is_symlink()
        if os.path.lexists(run) and not is_demo:
            raise ConfigError(
                f"{run} is not from a demo, so it is not deleted: move it away, or give "
                "another --directory"
            )
    for run in runs:
        if run.exists():
            # Delete the marker last, so that after a killed demo the directory is still recognised.
            for path in sorted(run.iterdir(), key=lambda path: path.name == _MARK):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        run.mkdir(parents=True, exist_ok=True)
        (run / _MARK).touch()
    return list(map(str, runs))


def run_demo(undisturbed: RunConfig, disturbed: RunConfig, *, console: Console) -> DemoResult:
    """Train both runs on the same simulated nodes, print what happens and write the report."""
    console.print("Starting simulated nodes on this machine ...", highlight=False)
    share = undisturbed.cluster.gpus_per_worker
    if share:
        shared = f", {share:g} of one each: they take turns" if share < 1 else ""
        what = f"{undisturbed.workers.max} workers train on {len(gpus_here())} GPU"
        console.print(f"{what}{shared}", highlight=False)
    cluster = open_cluster(undisturbed)
    assert cluster is not None, "the demo has its own nodes"
    try:
        calm = _train(Launched(undisturbed, cluster), "undisturbed", console)
        rough = _train(Launched(disturbed, cluster), "disturbed", console, _story)
    finally:
        cluster.shutdown()
    report = write_report(disturbed.run.directory, compare=undisturbed.run.directory)
    weights_equal = calm["weights_digest"] == rough["weights_digest"]
    found = diff_runs(undisturbed.run.directory, disturbed.run.directory, weights=False)
    apart = max((one.max_relative for one in found.numbers if one.name == "loss"), default=0.0)
    result = DemoResult(
        undisturbed=calm,
        disturbed=rough,
        weights_equal=weights_equal,
        apart=apart,
        is_same=weights_equal if undisturbed.train.deterministic else apart <= _APART_MAX,
        report=str(report),
    )
    _print_result(result, disturbed.run.directory, console)
    return result


def _train(
    run: Launched,
    title: str,
    console: Console,
    disturb: Callable[[Launched, RunView], None] = lambda _run, _view: None,
) -> dict[str, Any]:
    with RunView(console, title=title, total_steps=run.config.train.steps) as view:
        disturb(run, view)
        return run.follow(view.show)


def _story(run: Launched, view: RunView) -> None:
    """Kill a worker, kill a node, add a node; each one after the run has recovered."""
    assert run.cluster is not None
    total = run.config.train.steps

    def reach(share: float, workers: int | None = None) -> dict[str, Any] | None:
        return wait_for(
            run,
            lambda status: (
                status["phase"] == "training"
                and status["step"] >= share * total
                and (workers is None or len(status["workers"]) == workers)
            ),
            timeout_s=ACT_S_MAX,
            on_status=view.show,
        )

    if reach(0.2) is None:
        return
    victim = signal_rank(run, 1, signal.SIGKILL)
    view.say(f"kill -9 {victim['pid']} (rank 1, {victim['worker']})", style="red")
    status = reach(0.4)
    if status is None:
        return
    workers_before = len(status["workers"])
    node = kill_node_of(run, len(status["workers"]) - 1)
    view.say(f"kill node {node[:8]} (raylet and all its processes)", style="red")
    if reach(0.6) is None:
        return
    node = run.cluster.add_node()
    view.say(f"a node is back: {node[:8]}", style="green")
    reach(0.0, workers_before)


def _print_result(result: DemoResult, directory: str, console: Console) -> None:
    table = Table(
        title="Incidents of the disturbed run",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    columns = ("what", "who", "found in", "lost", "back in", "loaded from", "layout")
    for name in columns:
        right = name in {"found in", "lost", "back in"}
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for incident in read_run(directory).incidents:
        table.add_row(
            incident.kind,
            ", ".join(incident.guilty) or "-",
            _seconds(incident.detect_s),
            str(incident.lost_steps),
            _seconds(incident.recovery_s),
            "\n".join(f"{format_bytes(size)} {name}" for name, size in incident.sources.items())
            or "-",
            # One below the other, because 80 columns have no room for both in a row.
            "\n".join(dict.fromkeys((incident.layout_before, incident.layout_after))),
        )
    console.print(table)
    for name, summary in (("undisturbed", result.undisturbed), ("disturbed", result.disturbed)):
        loss = summary["validation_loss"]
        console.print(
            f"{name:>12}: validation loss {loss:.6f}, {summary['steps']} steps "
            f"({summary['lost_steps']} lost) in {summary['wall_s']:.1f} s, "
            f"weights {summary['weights_digest'][:12]}",
            highlight=False,
            soft_wrap=True,
        )
    colour = "green" if result.is_same else "red"
    verdict = "equal" if result.weights_equal else "different"
    console.print(f"The weights of the two runs are [{colour}]{verdict}[/{colour}].")
    if not result.weights_equal:
        console.print(
            f"Their losses differ by at most [{colour}]{result.apart:.2%}[/{colour}] at any step: "
            "another layout sums in another order."
        )
    console.print(f"Report: {result.report}", highlight=False, markup=False, soft_wrap=True)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
