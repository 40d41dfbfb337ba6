"""``ucp``: look into checkpoints, convert them, verify them.

Exit codes: 0 success; 1 the checkpoint is missing, damaged or cannot be used; 2 wrong usage
(an option or argument); 3 the storage refused. Errors are one line on stderr.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ucp_core.checkpoint import Checkpoint, materialise, open_checkpoint, verify
from ucp_core.errors import StorageError, UcpError
from ucp_core.storage import open_store
from ucp_core.universal import MEMORY_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXIT_CHECKPOINT = 1
EXIT_USAGE = 2
EXIT_STORAGE = 3

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6}
_UNITS |= {"GB": 10**9, "B": 1}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Look into checkpoints, convert them and verify them. "
    "Exit codes: 0 success, 1 missing or damaged checkpoint, 2 wrong usage, 3 storage refused.",
)

_Url = Annotated[str, typer.Argument(help="Directory or fsspec URL of the checkpoint.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


@app.command(
    epilog="Example: ucp inspect runs/demo/checkpoints/step-00001200 --tensors",
)
def inspect(
    checkpoint: _Url,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,  # noqa: FBT002 - a flag of the command line
    as_json: _Json = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Show what a checkpoint holds; reads its manifest only."""
    opened = _open(checkpoint)
    facts = _facts(opened, checkpoint)
    if as_json:
        facts["tensors"] = _tensor_facts(opened)
        _print_json(facts)
        return
    for name, value in facts.items():
        typer.echo(f"{name:<12} {_text(value)}")
    if tensors:
        typer.echo()
        for item in _tensor_facts(opened):
            shape = "x".join(map(str, item["shape"])) or "scalar"
            typer.echo(
                f"{item['fqn']} {item['slot']} {item['dtype']} {shape} "
                f"in {item['fragments']} fragment(s)"
            )


@app.command(
    epilog="Example: ucp convert runs/demo/checkpoints/step-00001200 exported --memory 512MiB",
)
def convert(
    source: _Url,
    destination: Annotated[str, typer.Argument(help="Directory or URL that holds none yet.")],
    memory: Annotated[
        str, typer.Option(help="Bound of the buffers, such as 512MiB or 2GB.")
    ] = "512MiB",
    as_json: _Json = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Make a universal checkpoint: whole tensors in safetensors files that any tool reads."""
    memory_bytes = _size(memory)
    opened = _open(source)
    store, directory = open_store(destination)
    with _progress("converting", as_json=as_json) as progress:
        materialise(opened, store, directory, memory_bytes=memory_bytes, progress=progress)
    made = open_checkpoint(store, directory)
    if as_json:
        _print_json(_facts(made, destination))
    else:
        size = _human(made.state_map.num_bytes)
        typer.echo(f"{destination}: {len(made.state_map.entries)} tensors, {size}")


@app.command(
    "verify",
    epilog="Example: ucp verify runs/demo/checkpoints/step-00001200",
)
def verify_command(
    checkpoint: _Url,
    as_json: _Json = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Read every byte of a checkpoint and name what is damaged; exit code 1 if anything is."""
    opened = _open(checkpoint)
    with _progress("verifying", as_json=as_json) as progress:
        problems = verify(opened, progress=progress)
    num_bytes = sum(entry.num_bytes for entry in opened.manifest.files.values())
    if as_json:
        found = [{"path": problem.path, "message": problem.message} for problem in problems]
        _print_json({"ok": not problems, "bytes": num_bytes, "problems": found})
    else:
        for problem in problems:
            typer.echo(str(problem))
        typer.echo(f"{_human(num_bytes)} read, {len(problems)} problem(s)")
    if problems:
        raise typer.Exit(EXIT_CHECKPOINT)


def main() -> None:
    """Run the command line; errors become one line and an exit code."""
    try:
        app()
    except StorageError as error:
        _fail(error, EXIT_STORAGE)
    except UcpError as error:
        _fail(error, EXIT_CHECKPOINT)


def _fail(error: UcpError, code: int) -> None:
    typer.echo(f"ucp: {' '.join(str(error).split())}", err=True)
    sys.exit(code)


def _open(url: str) -> Checkpoint:
    store, directory = open_store(url)
    return open_checkpoint(store, directory)


def _facts(opened: Checkpoint, url: str) -> dict[str, Any]:
    manifest = opened.manifest
    entries = manifest.state_map.entries
    return {
        "checkpoint": url,
        "format": str(manifest.kind),
        "step": manifest.step,
        "attempt": manifest.attempt,
        "ranks": manifest.world_size,
        "parameters": sum(1 for key in entries if key.slot == "weight"),
        "slots": sorted({key.slot for key in entries}),
        "bytes": manifest.state_map.num_bytes,
        "fragments": sum(len(entry.fragments) for entry in entries.values()),
        "files": len(manifest.files),
        "groups": len(manifest.param_groups),
        "extra": sorted(manifest.extra),
        "source": dict(manifest.source),
    }


def _tensor_facts(opened: Checkpoint) -> list[dict[str, Any]]:
    return [
        {
            "fqn": key.fqn,
            "slot": key.slot,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "fragments": len(entry.fragments),
        }
        for key, entry in sorted(opened.state_map.entries.items())
    ]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items()) or "-"
    return str(value)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def _size(text: str) -> int:
    """Return the bytes that ``512MiB`` and its like mean."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise typer.BadParameter(f"{text!r} is not a size: give a number and one of {units}")
    num_bytes = int(float(match[1]) * _UNITS[match[2]])
    if num_bytes < MEMORY_BYTES_MIN:
        raise typer.BadParameter(f"{text!r} is too small: give at least {MEMORY_BYTES_MIN} bytes")
    return num_bytes


def _human(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - the step between units
            return f"{value:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1024
    return f"{value:.1f} TiB"


@contextmanager
def _progress(what: str, *, as_json: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Give a bar with rate and time left if a person looks at a terminal, else None."""
    if as_json or not sys.stderr.isatty():
        yield None
        return
    # rich takes 50 ms to import, and programs never need it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
    main()
