"""``ucp convert`` makes a universal checkpoint."""

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
    app,
    memory_size,
    open_any,
    print_json,
    progress,
)
from ucp_core.numerics import format_bytes
from ucp_core.storage import open_store

if TYPE_CHECKING:
    from ucp_core.conversion import ConvertResult


@app.command(
    "convert",
    epilog="Example: ucp convert runs/demo/checkpoints/step-00001200 exported --memory 512MiB",
)
def convert_command(  # noqa: PLR0913 - options of a command
    source: Source,
    destination: Annotated[str, typer.Argument(help="Directory or URL; new or empty.")],
    *,
    memory: Memory = "512MiB",
    processes: Annotated[
        int | None, typer.Option(min=1, help="At most this many; default: one per core.")
    ] = None,
    rules: RulesFile = None,
    rename: RenameFile = None,
    tag: Tag = None,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted conversion.")] = True,
    fsync: Annotated[
        bool, typer.Option(help="Return only once the result would survive a power loss.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a universal checkpoint: whole tensors in safetensors files that any tool reads."""
    from ucp_core.conversion import convert, memory_left

    memory_bytes = memory_size(memory)
    opened = open_any(source, rules=rules, rename=rename, tag=tag, memory_bytes=memory_bytes)
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
    facts = conversion_facts(result, destination)
    if as_json:
        print_json(facts)
        return
    rate = format_bytes(int(result.size_bytes / max(result.seconds, 1e-9)))
    typer.echo(
        f"{destination}: {facts['tensors']} tensors, {format_bytes(result.size_bytes)} in "
        f"{result.seconds:.1f} s ({rate}/s)"
    )
    if result.resumed_bytes:
        typer.echo(f"{format_bytes(result.resumed_bytes)} came from an interrupted conversion")


def conversion_facts(result: ConvertResult, destination: str) -> dict[str, Any]:
    """Return the facts of a conversion, for programs."""
    manifest = result.checkpoint.manifest
    return {
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
