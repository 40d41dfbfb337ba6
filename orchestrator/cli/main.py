"""The ``everstep`` command; ``exit_codes`` has the table of its exit codes."""

import inspect
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial, wraps
from shlex import quote
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from typer.core import TyperGroup

from orchestrator.cli.exit_codes import (
    TABLE,
    ExitCode,
    code_of_error,
    code_of_outcome,
    code_of_signal,
    is_final,
)
from orchestrator.driver import Interrupt, interrupts, raise_interrupt
from orchestrator.errors import ConfigError, OrchestratorError
from ucp_core.errors import UcpError
from workers.errors import missing_extra

#: ``everstep run`` reads this file if no configuration is named.
DEFAULT_CONFIG = "everstep.yaml"
#: Heading in ``everstep --help`` for commands that few runs need.
_TOOLS = "Tools"
#: Other names for a command that people type.
_MEANT = {
    "attach": "run",
    "resume": "run",
    "start": "run",
    "submit": "run",
    "train": "run",
    "cancel": "stop",
    "kill": "stop",
    "ls": "list",
    "ps": "list",
    "new": "init",
    "compare": "diff",
}


class _Commands(TyperGroup):
    """Suggests commands for synonyms, as well as for similar spellings."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        meant = _MEANT.get(cmd_name)
        if meant and not ctx.resilient_parsing:
            ctx.fail(f"No such command {cmd_name!r}. Did you mean {meant!r}?")
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="everstep",
    cls=_Commands,
    help="Elastic training for torch on Ray: runs that recover from faults.",
    epilog=TABLE,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

P = ParamSpec("P")
R = TypeVar("R")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print a JSON document per line.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the bound of every wait too.")]
RunDirectory = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Path or fsspec URL.")]
Config = Annotated[
    str | None,
    typer.Argument(
        metavar="[CONFIG.yaml]",
        help="Path or URL, or the name of an example: local/small. Default: everstep.yaml.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Override settings.")
]

#: Period of ``status --watch``, in seconds.
_WATCH_S = 1.0
#: Period of ``list --serve``, in seconds; it connects to every cluster.
_INDEX_S = 5.0
#: Program of an ``everstep`` process that ends when the process that started it ends.
_TRY = """
from workers.parent_death import end_with_parent
end_with_parent()
from orchestrator.cli.main import main
main()
"""


def main() -> NoReturn:
    """Run the command line; the process ends with the documented exit code."""
    app()
    sys.exit(ExitCode.OK)


def _edge(command: Callable[P, R]) -> Callable[P, R]:
    """Turn our errors into one line on stderr and an exit code; end cleanly on a signal."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with interrupts(raise_interrupt):
                return command(*args, **kwargs)
        except (OrchestratorError, UcpError) as error:
            typer.echo(f"everstep: {error}", err=True)
            raise typer.Exit(code_of_error(error)) from error
        except ModuleNotFoundError as error:
            if not (hint := missing_extra(error)):
                raise
            typer.echo(f"everstep: {hint}", err=True)
            raise typer.Exit(ExitCode.BAD_INPUT) from error
        except Interrupt as interrupt:
            raise typer.Exit(code_of_signal(interrupt.number)) from interrupt

    # Typer keeps the line breaks of a docstring, and wraps the lines again for the terminal.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    wrapped.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return wrapped


def _version(*, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"everstep {version('everstep')}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda wanted: _version(wanted=wanted),
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Elastic training for torch on Ray: runs that recover from faults."""


@app.command(epilog="Example: everstep init train.py")
@_edge
def init(
    script: Annotated[
        str | None, typer.Argument(metavar="[SCRIPT.py]", help="Your training script.")
    ] = None,
    *,
    to: Annotated[str, typer.Option(metavar="FILE", help="New file.")] = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Write a configuration with every key, its meaning and default; `everstep run` reads it.

    Without SCRIPT, it trains the built-in language model on the text of Python's own library.
    Arguments that SCRIPT passes to `everstep.run` as literals are copied.
    """
    from orchestrator.driver import init_config

    written = init_config(script, to)
    if as_json:
        typer.echo(json.dumps(written))
    else:
        named = "" if to == DEFAULT_CONFIG else f" {to}"
        typer.echo(f"wrote {to}; edit it, then: everstep run{named}")


@app.command(rich_help_panel=_TOOLS, epilog="Example: everstep schema > everstep.schema.json")
@_edge
def schema(*, as_json: Json = False) -> None:
    """Print the JSON schema of a configuration, for editors."""
    from orchestrator.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=None if as_json else 1))


@app.command(epilog="Example: everstep run local/small train.steps=500 workers.max=3")
@_edge
def run(
    config: Config = None,
    overrides: Overrides = None,
    *,
    address: Annotated[str | None, typer.Option(help="Ray cluster to train on.")] = None,
    local_nodes: Annotated[int | None, typer.Option(help="Simulated nodes to start here.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return at once; the run continues.")
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Train; or attach to the run in the directory that CONFIG names, or resume it.

    A run that was stopped, has failed or lost its cluster resumes after its last committed step.
    Settings that affect no step may change.

    With --address or RAY_ADDRESS, the run belongs to that cluster. It continues after this command
    ends, and Ctrl-C only stops following it. Otherwise, this command starts simulated nodes on this
    machine, and they end with it. Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2 or a closed terminal stops the
    run at the next step boundary; a second Ctrl-C stops it at once. With --detach, the nodes live
    until the run is over.
    """
    from orchestrator.config import load, run_preflight

    config, overrides = _named(config, overrides)
    from orchestrator.driver import require_unfinished, settings_of_script

    ask = partial(settings_of_script, say=partial(typer.echo, err=as_json))
    settings = load(config, _extra(overrides, address, local_nodes), look=run_preflight, ask=ask)
    require_unfinished(settings)  # before Ray is even imported
    from orchestrator.detection import limits_from
    from orchestrator.driver import RunView, follow_run, launch_run, open_console, print_bounds
    from orchestrator.report import bounds_document

    directory = settings.run.directory
    console = open_console(stderr=as_json)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"run directory {directory}")
    if cost := settings.train.recheck_cost(settings.workers.max // settings.parallel.cp):
        say(cost)
    place = quote(directory)
    try:
        with interrupts(raise_interrupt):
            launched = launch_run(settings, detach=detach, say=say)
    except Interrupt as interrupt:
        _say_ended(interrupt, f"`everstep status {place}` says whether a run was started")
        raise
    if verbose:
        bounds_s = bounds_document(settings, limits_from(0.0, patience=settings.recovery.patience))
        print_bounds(bounds_s, settings.recovery.patience, console)
    if detach:
        say(
            f"the run continues; look at it with `everstep status {place}` or `everstep logs "
            f"{place} --follow`, stop it with `everstep stop {place}`"
        )
        if as_json:
            typer.echo(json.dumps({"run_directory": directory}))
        return
    view = RunView(console, title=settings.run.name, total_steps=settings.train.steps)
    try:
        summary, number = follow_run(launched, view)
    except Interrupt as interrupt:
        _say_ended(interrupt, launched.what_continues())
        raise
    _finish(summary, directory, as_json=as_json)
    if number is not None:
        raise typer.Exit(code_of_signal(number))
    raise typer.Exit(code_of_outcome(summary["outcome"]))


@app.command(epilog="Example: everstep watch run.yaml --address auto")
@_edge
def watch(
    config: Config = None,
    overrides: Overrides = None,
    *,
    address: Annotated[
        list[str] | None,
        typer.Option(help=("Ray cluster to train on; repeat it to try several in turn.")),
    ] = None,
    local_nodes: Annotated[int | None, typer.Option(help="Simulated nodes to start here.")] = None,
    as_json: Json = False,
) -> None:
    """Train unattended: repeat `everstep run` until the run ends for good.

    If the head or the whole cluster is lost, this command waits for a cluster at the same address,
    or at the next --address. It then resumes after the last committed step. The pauses between
    tries grow to a minute. After the first try it also waits for unavailable storage. It ends when
    the run is over, has failed or was stopped, or when no cluster has advanced it for
    recovery.capacity_wait_s. Signals have the same effect as on `everstep run`.
    """
    from orchestrator.config import load
    from orchestrator.driver import watch_run

    config, overrides = _named(config, overrides)
    options = [f"--local-nodes={local_nodes}"] if local_nodes is not None else []
    options += ["--json"] if as_json else []
    run = [sys.executable, "-c", _TRY, "run", config, *(overrides or []), *options]
    commands = [[*run, f"--address={each}"] for each in address or ()] or [run]
    extra = _extra(overrides, next(iter(address or ()), None), local_nodes)
    settings = load(config, extra)
    watched = watch_run(
        commands,
        settings,
        is_final=partial(_is_final, config, extra),
        say=lambda line: typer.echo(f"everstep: {line}", err=True),
    )
    if watched.code is not None:
        raise typer.Exit(watched.code)
    assert watched.summary is not None, "without a code it is over"
    _finish(watched.summary, settings.run.directory, as_json=as_json)
    raise typer.Exit(code_of_outcome(watched.summary["outcome"]))


@app.command(rich_help_panel=_TOOLS, epilog="Example: everstep demo --json")
@_edge
def demo(
    *,
    directory: Annotated[str, typer.Option(help="Where the two run directories go.")] = "runs/demo",
    layout: Annotated[
        str | None,
        typer.Option(metavar="tp2,pp2", help="Degrees of tensor and pipeline parallelism."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a small LM twice: undisturbed, and with a worker and a node killed."""
    from orchestrator.config import demo_config
    from orchestrator.driver import demo_directories, layout_overrides, open_console, run_demo

    overrides = [] if layout is None else layout_overrides(layout)
    undisturbed, disturbed = (demo_config(each, overrides) for each in demo_directories(directory))
    result = run_demo(undisturbed, disturbed, console=open_console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    if not result.is_same:
        raise typer.Exit(ExitCode.FAILED)


@app.command("list", epilog="Example: everstep list --address 10.0.0.1:6379")
@_edge
def list_(
    *,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="Only this Ray cluster.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the list in a browser, with links to their pages.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, help="Port of that page; 0 for a free one.")] = 0,
    as_json: Json = False,
) -> None:
    """List every run on this machine or cluster, detached and orphaned ones too."""
    from orchestrator.driver import RunIndex, list_runs, print_runs

    if serve:
        index = RunIndex(port)
        _print({"page": index.address}, as_json=as_json)
        index.serve(partial(list_runs, address), pause=partial(time.sleep, _INDEX_S))
    runs = list_runs(address)
    _show({"runs": runs}, partial(print_runs, runs, Console()), as_json=as_json)


@app.command("open", epilog="Example: everstep open runs/small")
@_edge
def open_(
    run_dir: RunDirectory,
    *,
    only_print: Annotated[
        bool, typer.Option("--print", help="Only print the address, without opening a browser.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Open the live page of a run in a browser, and say how to reach it from elsewhere.

    If there is no browser, as on a server, it prints the address.
    """
    from orchestrator.driver import open_page

    _print(open_page(run_dir, browser=not only_print and not as_json), as_json=as_json)


@app.command(epilog="Example: everstep status runs/small --watch")
@_edge
def status(
    run_dir: RunDirectory,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it every second until the run is over.")
    ] = False,
    verbose: Verbose = False,
    as_json: JsonLines = False,
) -> None:
    """Show the state of a run: phase, step, loss, workers, nodes, and which step is safe."""
    from rich.live import Live

    from orchestrator.driver import open_console, print_status, read_status, status_view

    console = open_console()
    in_place = Live(console=console, auto_refresh=False, vertical_overflow="crop")
    with in_place if watch and console.is_interactive and not as_json else nullcontext():
        while True:
            document = read_status(run_dir)
            if as_json:
                typer.echo(json.dumps(document))
            elif in_place.is_started:
                in_place.update(status_view(document, verbose=verbose), refresh=True)
            else:
                print_status(document, console, verbose=verbose)
            if not watch or document["controller"] == "over":
                return
            time.sleep(_WATCH_S)


@app.command(epilog="Example: everstep logs runs/small --follow")
@_edge
def logs(
    run_dir: RunDirectory,
    *,
    rank: Annotated[int, typer.Option(min=-1, help="Rank whose lines to print; -1 for all.")] = 0,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Only this attempt; default: all.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more lines until the run is over.")
    ] = False,
    as_json: JsonLines = False,
) -> None:
    """Print the output of the training script; by default, that of rank 0."""
    from orchestrator.driver import read_logs

    one_rank = rank if rank >= 0 else None
    for line in read_logs(run_dir, rank=one_rank, attempt=attempt, follow=follow):
        if as_json:
            typer.echo(json.dumps(asdict(line)))
        else:
            typer.echo(line.text if rank >= 0 else f"[rank {line.rank}] {line.text}")


@app.command(epilog="Example: everstep stop runs/small --wait")
@_edge
def stop(
    run_dir: RunDirectory,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the run is over.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Kill its processes now; steps since the last save are lost."),
    ] = False,
    token: Annotated[
        str,
        typer.Option(
            envvar="EVERSTEP_TOKEN", help=("Token of the run. Default: read from RUN_DIR/token.")
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Stop a run at the next step boundary, with that step committed."""
    from orchestrator.driver import Run, await_end, kill_run, stop_run

    if force:
        kill_run(run_dir, token=token)
        _print({"killed": run_dir, "note": Run(run_dir).safe_text()}, as_json=as_json)
        return
    say = partial(Console(stderr=True).print, highlight=False, markup=False, soft_wrap=True)
    stop_run(run_dir, "everstep stop", say=say, token=token)
    if not wait:
        _print({"stopping": run_dir}, as_json=as_json)
        return
    summary = await_end(run_dir)
    _finish(summary, run_dir, as_json=as_json)
    raise typer.Exit(code_of_outcome(summary["outcome"]))


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


@app.command(epilog="Example: everstep diff runs/demo/undisturbed runs/demo/disturbed --json")
@_edge
def diff(
    a: Annotated[str, typer.Argument(metavar="RUN_A", help="Path or fsspec URL.")],
    b: Annotated[str, typer.Argument(metavar="RUN_B", help="The other run's.")],
    *,
    weights: Annotated[bool, typer.Option(help="Compare versions in storage, too.")] = True,
    as_json: Json = False,
) -> None:
    """Compare two runs step by step; exit code 1 if they differ.

    Says which step differs first, in which numbers and by how many bits. Also names the incident
    before that step in each run, the settings that differ, and whether the versions that both runs
    have are equal.
    """
    from orchestrator.driver import diff_runs

    found = diff_runs(a, b, weights=weights)
    _show(found.to_json(), lambda: typer.echo("\n".join(found.lines())), as_json=as_json)
    if not found.equal:
        raise typer.Exit(ExitCode.FAILED)


@app.command(rich_help_panel=_TOOLS, epilog="Example: everstep replay runs/small --json")
@_edge
def replay(run_dir: RunDirectory, *, as_json: Json = False) -> None:
    """Replay the journal and check that it leads to the same decisions."""
    from orchestrator.driver import replay_run

    _print(replay_run(run_dir), as_json=as_json)


@app.command(epilog="Example: everstep diagnose dumps --json")
@_edge
def diagnose(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files or directories.")],
    *,
    at: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="When the records were taken, by their clock: operations that have waited no "
            "longer than usual then are ignored. Without it, any operation in flight "
            "counts as hung.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a trace for Perfetto, from 30 s before."),
    ] = None,
    flight_recorder: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Write dumps for torch's fr_trace."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find from records which rank, link or program is at fault, and how.

    Reads record rings of everstep, dumps of torch's flight recorder (each file name ends with its
    rank; nothing in it is executed), and JSON lines with one operation each: step, rank, dp, pp,
    tp, op, seq, comm, comm_ranks, t_enter, t_exit (null while in flight), bytes. For a rank's own
    work, op is data, forward, backward or optimizer, and comm is null. A call inside such a span
    counts as a wait for others, not as the rank's own work. Reports only faults that the records
    show. If the verdict is undecided, it says what is missing and which file is truncated.

    --trace writes a file for Perfetto (ui.perfetto.dev): each rank's own work, its calls by
    communicator, and the verdicts. --flight-recorder writes dumps for torch's own analyzer, python
    -m torch.distributed.flight_recorder.fr_trace FOLDER.
    """
    from orchestrator.driver import diagnose_paths, verdict_lines

    verdicts = diagnose_paths(paths, at, trace_file=trace, dumps_folder=flight_recorder)
    document = {"verdicts": [one.to_json() for one in verdicts]}
    _show(document, lambda: typer.echo("\n".join(verdict_lines(verdicts))), as_json=as_json)


@app.command(
    rich_help_panel=_TOOLS,
    epilog="Example: everstep convert s3://runs/step-00001200 /shared/out --json",
)
@_edge
def convert(  # noqa: PLR0913 - options of a command
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint of any format.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="On shared storage.")],
    *,
    address: Annotated[str | None, typer.Option(help="Ray cluster that does the work.")] = None,
    local_nodes: Annotated[int | None, typer.Option(help="Simulated nodes to start here.")] = None,
    memory: Annotated[str, typer.Option(help="Limit for the buffers on a node.")] = "512MiB",
    rules: Annotated[str | None, typer.Option(help="File of rules for unusual models.")] = None,
    rename: Annotated[str | None, typer.Option(help="File of renamings of tensors.")] = None,
    tag: Annotated[
        str | None, typer.Option(help="Which one, if SRC has several checkpoints.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a universal checkpoint on all nodes of a cluster; `ucp convert` uses one machine."""
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


@app.command(
    epilog="Example: everstep export runs/small --to tuned --format huggingface --dtype bf16"
)
@_edge
def export(  # noqa: PLR0913 - options of a command
    run_dir: RunDirectory,
    *,
    to: Annotated[str, typer.Option(metavar="DST", help="New directory or URL.")],
    format: Annotated[  # noqa: A002 - the word of the command line
        str, typer.Option(help="huggingface, dcp, megatron-core, deepspeed, universal, ...")
    ] = "huggingface",
    step: Annotated[int | None, typer.Option(min=1, help="Default: the newest in storage.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best step (checkpoint.best).")] = False,
    average: Annotated[
        bool, typer.Option("--average", help="The average of the weights (session.average).")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Cast floats to fp32, fp16 or bf16.")] = None,
    memory: Annotated[str, typer.Option(help="Limit for the buffers.")] = "512MiB",
    as_json: Json = False,
) -> None:
    """Write the newest committed step in another format, also while the run trains.

    Hugging Face gets configuration and tokenizer, if the run knows them. `ucp export
    RUN_DIR/checkpoints/step-...` has more options.
    """
    from orchestrator.driver import export_run
    from ucp_core.commands import memory_size

    options: dict[str, Any] = {"average": average}
    options |= {} if dtype is None else {"dtype": dtype}
    memory_bytes = memory_size(memory)
    document = export_run(
        run_dir, to, format=format, memory_bytes=memory_bytes, step=step, best=best, **options
    )
    _print(document, as_json=as_json)


@app.command(
    epilog="Example: everstep plan runs/small --lose 3f9c, or everstep plan run.yaml --gpus 8x8"
)
@_edge
def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR|CONFIG", help="Directory of a live run; with --gpus, a configuration."
        ),
    ],
    overrides: Overrides = None,
    *,
    lose: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="Node id or its beginning; worker:w0003."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="NODESxGPUS", help="Compare layouts for these, such as 8x8."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Kind of these GPUs.")] = "h100",
    model: Annotated[
        str | None, typer.Option(help="Model to use instead of CONFIG's, such as llama-70b.")
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option(help="Whether to recompute layers in the backward pass; default: the better."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what would happen if machines were lost now: version, lost steps, sources, workers.

    Without --lose, shows it for the loss of each single node. With --gpus, shows the layouts in
    which such GPUs could train CONFIG, with step time, memory, bubbles, state to move, and why each
    is chosen or not. Keeps the parallel degrees that CONFIG sets.
    """
    from orchestrator.driver import plan_each_node, plan_losses, print_node_plans, print_plan

    if gpus is not None:
        from orchestrator.driver import plan_layouts, print_layouts

        layouts = plan_layouts(
            target,
            overrides or [],
            gpus=gpus,
            gpu=gpu,
            model=model,
            recomputes=recompute,
        )
        _show(layouts.to_json(), partial(print_layouts, layouts, Console()), as_json=as_json)
        return
    if lose:
        found = plan_losses(target, lose)
        _show(found.to_json(), partial(print_plan, found, Console()), as_json=as_json)
        return
    each = plan_each_node(target)
    document = {"plans": [one.to_json() for one in each]}
    _show(document, partial(print_node_plans, each, Console()), as_json=as_json)


@app.command(epilog="Example: everstep doctor run.yaml --address auto")
@_edge
def doctor(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG.yaml]", help="The run's settings.")
    ] = None,
    overrides: Overrides = None,
    *,
    address: Annotated[str | None, typer.Option(help="Ray cluster to check.")] = None,
    as_json: Json = False,
) -> None:
    """Check a cluster before a run: versions, storage, network, memory, room for workers.

    Checks this machine, or every node of the cluster that --address, CONFIG or RAY_ADDRESS names.
    Exits with code 1 if a run would not work.
    """
    from orchestrator.config import load
    from orchestrator.driver import advice_lines, examine, report

    settings = load(config, _extra(overrides, address)) if config is not None else None
    findings, nodes = examine(settings, address=address)
    document = report(findings, nodes)
    typer.echo(json.dumps(document) if as_json else "\n".join(advice_lines(findings)))
    if not document["ok"]:
        raise typer.Exit(ExitCode.FAILED)


def _named(config: str | None, overrides: list[str] | None) -> tuple[str, list[str]]:
    """Return the configuration and the overrides; the first word may be either."""
    words = [*([] if config is None else [config]), *(overrides or ())]
    is_named = words and "=" not in words[0]
    return (words[0], words[1:]) if is_named else (DEFAULT_CONFIG, words)


def _extra(
    overrides: list[str] | None, address: str | None, local_nodes: int | None = None
) -> list[str]:
    """Return ``overrides`` followed by those from options."""
    options = {"cluster.address": address, "cluster.local_nodes": local_nodes}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return [*(overrides or ()), *given]


def _is_final(config: str, extra: list[str], code: int, num_before: int) -> bool:
    """Return whether an ``everstep run`` that ended with ``code`` would do so again.

    After the first try, bad input can also come from an outage: storage is unavailable, and with it
    CONFIG or files that it names.
    """
    from orchestrator.config import load

    if code != ExitCode.BAD_INPUT or not num_before:
        return is_final(code)
    try:
        load(config, extra)
    except ConfigError as error:
        return not isinstance(error.__cause__, UcpError)
    return False


def _say_ended(interrupt: Interrupt, what_then: str) -> None:
    typer.echo(f"everstep: ended by {interrupt.number.name}: {what_then}", err=True)


def _show(document: dict[str, Any], show: Callable[[], None], *, as_json: bool) -> None:
    """Print the document for programs, and call ``show`` for people."""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        show()


def _print(document: dict[str, Any], *, as_json: bool) -> None:
    """Print all values for programs; for people, one line for each value that is not empty."""
    if as_json:
        typer.echo(json.dumps(document))
        return
    for key, value in document.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if text:
            typer.echo(f"{key.replace('_', ' ')}: {text}")


def _finish(summary: dict[str, Any], directory: str, *, as_json: bool) -> None:
    """Print how the run in ``directory`` ended."""
    from orchestrator.driver import Run, ending_lines

    how, *more = ending_lines(Run(directory), summary)
    if as_json:
        typer.echo(json.dumps(summary))
    if summary["outcome"] != "completed":
        typer.echo(how, err=True)
    elif not as_json:
        typer.echo(how)
    for line in () if as_json else more:
        typer.echo(line)
