"""The ``everstep`` command.

Exit codes: 0 success; 1 the run failed or the answer is "no"; 2 bad input (configuration,
arguments, a run directory that holds no run); 3 no capacity or no cluster; 130 and 143 the command
was ended by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial, wraps
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console

from orchestrator.errors import CapacityError, OrchestratorError, RunFailedError
from ucp_core.errors import UcpError
from workers.errors import missing_extra

app = typer.Typer(
    name="everstep",
    help="Elastic training for torch on Ray: runs that heal themselves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

P = ParamSpec("P")
R = TypeVar("R")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines.")]
RunDirectory = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Path or fsspec URL.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Override settings.")
]

_EXIT_CODES: dict[type[Exception], int] = {RunFailedError: 1, CapacityError: 3}


def main() -> NoReturn:
    """Run the command line; the process ends with the documented exit code."""
    app()
    sys.exit(0)


def _edge(command: Callable[P, R]) -> Callable[P, R]:
    """Turn our errors into one line on stderr and the exit code that says whose fault it was."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (OrchestratorError, UcpError) as error:
            typer.echo(f"everstep: {error}", err=True)
            raise typer.Exit(_EXIT_CODES.get(type(error), 2)) from error
        except ModuleNotFoundError as error:
            if not (hint := missing_extra(error)):
                raise
            typer.echo(f"everstep: {hint}", err=True)
            raise typer.Exit(2) from error

    return wrapped


@app.command(epilog="Example: everstep run local/small train.steps=500 workers.max=3")
@_edge
def run(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG.yaml", help="Path or URL, or the name of an example: local/small."
        ),
    ],
    overrides: Overrides = None,
    *,
    address: Annotated[str | None, typer.Option(help="Ray cluster to train on.")] = None,
    local_nodes: Annotated[int | None, typer.Option(help="Simulated nodes to start here.")] = None,
    detach: Annotated[bool, typer.Option(help="Return at once; the run goes on.")] = False,
    as_json: Json = False,
) -> None:
    """Train; or attach to the run in the directory that CONFIG names, or let it go on.

    A run that was stopped, that failed or that lost its cluster goes on behind its last committed
    step; settings on which no step depends may be others than before. Without --address and
    RAY_ADDRESS a Ray cluster of simulated nodes is started on this machine. Ctrl-C leaves the run
    going; `everstep stop` ends it.
    """
    from orchestrator.config import load, run_preflight

    extra = list(overrides or [])
    if address is not None:
        extra.append(f"cluster.address={address}")
    if local_nodes is not None:
        extra.append(f"cluster.local_nodes={local_nodes}")
    settings = load(config, extra, look=run_preflight)
    from orchestrator.detection import limits_from
    from orchestrator.driver import RunView, launch_run, print_bounds
    from orchestrator.shell import bounds_document

    directory = settings.run.directory
    console = Console(stderr=as_json)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"run directory {directory}")
    with _ending(f"no run was seen to begin; `everstep status {directory}` says if one did"):
        launched = launch_run(settings, say=say)
    print_bounds(
        bounds_document(settings, limits_from(0.0, patience=settings.patience)),
        settings.patience,
        console,
    )
    if detach:
        _print({"run_directory": directory}, as_json=as_json)
        return
    view = RunView(console, title=settings.run.name, total_steps=settings.train.steps)
    goes_on = f"the run goes on; the same command follows it, `everstep stop {directory}` ends it"
    with _ending(goes_on), view:
        summary = launched.follow(view.show)
    if launched.cluster is not None:
        launched.cluster.shutdown()
    _finish(summary, as_json=as_json)


@app.command(epilog="Example: everstep demo --json")
@_edge
def demo(
    *,
    directory: Annotated[str, typer.Option(help="Where the two run directories go.")] = "runs/demo",
    as_json: Json = False,
) -> None:
    """Train a small LM twice: undisturbed, and with a worker and a node killed under it."""
    import shutil
    from pathlib import Path

    from orchestrator.config import demo_config
    from orchestrator.driver import run_demo

    runs = [Path(directory) / name for name in ("undisturbed", "disturbed")]
    for path in runs:
        shutil.rmtree(path, ignore_errors=True)
    undisturbed, disturbed = (demo_config(str(path.resolve())) for path in runs)
    result = run_demo(undisturbed, disturbed, console=Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    if not result.weights_equal:
        raise typer.Exit(1)


@app.command(epilog="Example: everstep status runs/small --json")
@_edge
def status(run_dir: RunDirectory, *, as_json: Json = False) -> None:
    """Say where a run is: phase, step, loss, workers, nodes, capacity asked for."""
    from orchestrator.cli.status_view import print_status
    from orchestrator.driver import read_status

    document = read_status(run_dir)
    if as_json:
        typer.echo(json.dumps(document))
        return
    print_status(document, Console())


@app.command(epilog="Example: everstep stop runs/small")
@_edge
def stop(run_dir: RunDirectory, *, as_json: Json = False) -> None:
    """Stop a run at the next step boundary, with that step committed."""
    from orchestrator.driver import contact, stop_run

    say = partial(Console(stderr=True).print, highlight=False, markup=False, soft_wrap=True)
    stop_run(run_dir, contact(run_dir), "everstep stop", say=say)
    _print({"stopping": run_dir}, as_json=as_json)


@app.command(epilog="Example: everstep report runs/demo/disturbed --compare runs/demo/undisturbed")
@_edge
def report(
    run_dir: RunDirectory,
    *,
    compare: Annotated[str | None, typer.Option(help="A second run to draw beside it.")] = None,
    as_json: Json = False,
) -> None:
    """Write report.html into the run directory: loss, incidents, phases, goodput."""
    from orchestrator.report import write_report

    _print({"report": str(write_report(run_dir, compare=compare))}, as_json=as_json)


@app.command(epilog="Example: everstep replay runs/small --json")
@_edge
def replay(run_dir: RunDirectory, *, as_json: Json = False) -> None:
    """Fold the journal again and check that it leads to the same decisions."""
    from orchestrator.driver import replay_run

    _print(replay_run(run_dir), as_json=as_json)


@app.command(epilog="Example: everstep convert s3://runs/step-00001200 /shared/out --json")
@_edge
def convert(  # noqa: PLR0913 - options of a command
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint of any format.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="On shared storage.")],
    *,
    address: Annotated[str | None, typer.Option(help="Ray cluster that does the work.")] = None,
    local_nodes: Annotated[int | None, typer.Option(help="Simulated nodes to start here.")] = None,
    memory: Annotated[str, typer.Option(help="Bound of the buffers on a node.")] = "512MiB",
    rules: Annotated[str | None, typer.Option(help="File of rules for unusual models.")] = None,
    rename: Annotated[str | None, typer.Option(help="File of renamings of tensors.")] = None,
    tag: Annotated[str | None, typer.Option(help="Which of several checkpoints in SRC.")] = None,
    as_json: Json = False,
) -> None:
    """Make a universal checkpoint on all nodes of a cluster; `ucp convert` does it on one."""
    from orchestrator.driver import convert_command

    _print(
        convert_command(
            source,
            destination,
            address=address,
            local_nodes=local_nodes,
            memory=memory,
            rules=rules,
            rename=rename,
            tag=tag,
            quiet=as_json,
        ),
        as_json=as_json,
    )


@app.command(epilog="Example: everstep plan --recovery runs/small --lose 3f9c --lose worker:w0002")
@_edge
def plan(
    *,
    recovery: Annotated[str, typer.Option(metavar="RUN_DIR", help="A run that goes on now.")],
    lose: Annotated[
        list[str], typer.Option(metavar="NODE", help="Node id or its beginning; worker:w0003.")
    ],
    as_json: Json = False,
) -> None:
    """Say what would happen now if machines were lost: version, lost steps, sources, workers."""
    from orchestrator.driver import plan_losses

    found = plan_losses(recovery, lose)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    from orchestrator.driver import print_plan

    print_plan(found, Console())


@app.command(epilog="Example: everstep doctor run.yaml --address auto")
@_edge
def doctor(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG.yaml]", help="The run's settings.")
    ] = None,
    overrides: Overrides = None,
    *,
    address: Annotated[str | None, typer.Option(help="Ray cluster to look at.")] = None,
    as_json: Json = False,
) -> None:
    """Look for what a run would fail of: versions, storage, network, memory, room for workers.

    Looks at this machine, or at every node of the cluster that --address, CONFIG or RAY_ADDRESS
    names. Exit code 1 if a run could not work.
    """
    from orchestrator.config import load
    from orchestrator.driver import address_of, advice_lines, examine, report

    settings = load(config, list(overrides or [])) if config is not None else None
    findings, nodes = examine(settings, address=address_of(settings, address))
    document = report(findings, nodes)
    typer.echo(json.dumps(document) if as_json else "\n".join(advice_lines(findings)))
    if not document["ok"]:
        raise typer.Exit(1)


@app.command(epilog="Example: everstep simulate --histories 1000 --seed 7")
@_edge
def simulate(
    *,
    histories: Annotated[int, typer.Option(min=1, help="How many; each has its own seed.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the first.")] = 0,
    as_json: Json = False,
) -> None:
    """Run the controller's decisions against simulated faults and check the promises."""
    from orchestrator.simulation import run_campaign

    campaign = run_campaign(range(seed, seed + histories))
    _print(campaign.to_json(), as_json=as_json)
    if campaign.failures:
        raise typer.Exit(1)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def _ending(what_then: str) -> Iterator[None]:
    """Say what becomes of the run if Ctrl-C or SIGTERM ends the command within the block."""

    def terminate(_number: int, _frame: object) -> NoReturn:
        raise _Terminated

    # Ray's own handler prints a stack; Python's would end us with nothing cleaned up.
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT
        typer.echo(f"everstep: ended by {number.name}: {what_then}", err=True)
        raise typer.Exit(128 + number) from error
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _print(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document))
    else:
        for key, value in document.items():
            typer.echo(f"{key}: {value}")


def _finish(summary: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        left_out = {"incidents", "phases_s", "reason"}
        shown = {k: v for k, v in summary.items() if k not in left_out and v is not None}
        rounded = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in shown.items()}
        _print(rounded, as_json=False)
    if summary["outcome"] == "stopped":
        typer.echo(
            f"stopped after step {summary['steps']}: {summary['reason']}; the same command goes "
            "on from there",
            err=True,
        )
    if summary["outcome"] == "failed":
        typer.echo(f"\n{summary['reason']}", err=True)
        raise typer.Exit(1)
