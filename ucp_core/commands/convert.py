"""Commands of ``ucp`` that make a universal checkpoint, and that tell beforehand what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ucp_core.commands.console import (
    Json,
    Memory,
    RenameFile,
    RulesFile,
    Source,
    Tag,
    human,
    memory_size,
    open_any,
    print_json,
    progress,
    read_rules,
)
from ucp_core.storage import open_store

if TYPE_CHECKING:
    from ucp_core.conversion import Forecast
    from ucp_core.layout import ParallelLayout


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command(
        "convert",
        epilog="Example: ucp convert runs/demo/checkpoints/step-00001200 exported --memory 512MiB",
    )(convert_command)
    app.command(
        "plan",
        epilog="Example: ucp plan global_step1000 --layout dp_shard=4,tp=2 --rules model.yaml",
    )(plan_command)


def convert_command(  # noqa: PLR0913 - options of a command
    source: Source,
    destination: Annotated[str, typer.Argument(help="Directory or URL that holds none yet.")],
    *,
    memory: Memory = "512MiB",
    processes: Annotated[
        int | None, typer.Option(min=1, help="Work at once at most; default: one a processor.")
    ] = None,
    rules: RulesFile = None,
    rename: RenameFile = None,
    tag: Tag = None,
    resume: Annotated[
        bool, typer.Option(help="Go on with what a killed conversion left there.")
    ] = True,
    fsync: Annotated[
        bool, typer.Option(help="Return only when a loss of power cannot undo it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a universal checkpoint: whole tensors in safetensors files that any tool reads."""
    from ucp_core.conversion import convert, memory_left

    memory_bytes = memory_size(memory)
    opened = open_any(source, rules=rules, rename=rename, tag=tag)
    store, directory = open_store(destination)
    with progress("converting", as_json=as_json) as bar:
        result = convert(
            opened,
            store,
            directory,
            memory_bytes=memory_left(memory_bytes),
            processes=processes,
            progress=bar,
            resume=resume,
            fsync=fsync,
        )
    manifest = result.checkpoint.manifest
    facts: dict[str, Any] = {
        "checkpoint": destination,
        "format": str(manifest.kind),
        "step": manifest.step,
        "tensors": len(manifest.state_map.entries),
        "bytes": result.size_bytes,
        "read_bytes": result.read_bytes,
        "written_bytes": result.written_bytes,
        "resumed_bytes": result.resumed_bytes,
        "seconds": round(result.seconds, 3),
        "processes": result.processes,
        "threads": result.threads,
    }
    if as_json:
        print_json(facts)
        return
    rate = human(int(result.size_bytes / max(result.seconds, 1e-9)))
    typer.echo(
        f"{destination}: {facts['tensors']} tensors, {human(result.size_bytes)} in "
        f"{result.seconds:.1f} s ({rate}/s)"
    )
    if result.resumed_bytes:
        typer.echo(f"{human(result.resumed_bytes)} were there from a run that was interrupted")


def plan_command(
    source: Source,
    *,
    layout: Annotated[
        str | None,
        typer.Option(help="Of the run that would load it, as in dp_shard=4,tp=2,pp=2."),
    ] = None,
    destination: Annotated[
        str | None, typer.Option(help="Also try how fast this directory is written.")
    ] = None,
    rules: RulesFile = None,
    rename: RenameFile = None,
    tag: Tag = None,
    as_json: Json = False,
) -> None:
    """Tell what a conversion or a load would read, move and write, and how long it would take."""
    from ucp_core.conversion import forecast

    opened = open_any(source, rules=rules, rename=rename, tag=tag)
    target = None if layout is None else _layout(layout)
    found = forecast(opened, layout=target, rules=read_rules(rules), destination=destination)
    if as_json:
        print_json(found._asdict())
    else:
        _print_forecast(found, source)


def _print_forecast(found: Forecast, source: str) -> None:
    typer.echo(
        f"{source}: {found.tensors} tensors, {human(found.size_bytes)} in {found.fragments} "
        f"fragments of {found.files} files"
    )
    rate = human(int(found.read_bytes_per_s))
    typer.echo(f"reads        {human(found.read_bytes)}, tried: {rate}/s by one process")
    typer.echo(f"moves        {human(found.gathered_bytes)} through memory, the rest as it lies")
    typer.echo(f"writes       {human(found.written_bytes)} in {found.target_files} files")
    if found.convert_s is None:
        typer.echo("converting   give --destination to try how fast it is written")
    else:
        typer.echo(f"converting   about {found.convert_s:.1f} s by {found.processes} process(es)")
    if found.layout:
        typer.echo(
            f"loading      {found.layout}: {human(found.load_bytes_max)} by the rank that reads "
            f"most, {human(found.load_bytes)} by all; about {found.load_s:.1f} s"
        )


def _layout(text: str) -> ParallelLayout:
    """Return the layout that ``dp_shard=4,tp=2`` means."""
    from ucp_core.layout import ParallelLayout

    degrees: dict[str, Any] = {}
    for part in text.split(","):
        axis, _, degree = part.strip().partition("=")
        degrees[axis] = int(degree) if degree.isdigit() else degree
    try:
        return ParallelLayout.from_json(degrees)
    except (TypeError, AssertionError) as error:
        axes = ", ".join(ParallelLayout().to_json())
        raise typer.BadParameter(
            f"{text!r} is no layout ({error}): give axis=degree for any of {axes}"
        ) from error
