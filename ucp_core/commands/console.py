"""Shared by the commands of ``ucp``: app, options, opening a source, progress, output."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ucp_core.numerics import format_bytes, parse_bytes
from ucp_core.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucp_core.language import Rules
    from ucp_core.native import Checkpoint

EXIT_CHECKPOINT = 1
EXIT_STORAGE = 3

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Inspect, convert and verify checkpoints. Exit codes: 0 success, 1 missing or "
    "damaged checkpoint, 2 wrong usage, 3 storage refused.",
)

#: Period at which a progress bar moves, in seconds.
_REFRESH_S = 0.1

Source = Annotated[
    str, typer.Argument(help="Directory or URL of a checkpoint in any known format.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Memory = Annotated[str, typer.Option(help="Memory for buffers, such as 512MiB or 2GB.")]
RulesFile = Annotated[
    str | None,
    typer.Option(
        "--rules", help="How ranks cut the tensors: a file of rules, or a family such as llama."
    ),
]
RenameFile = Annotated[
    str | None, typer.Option("--rename", help="File of renamings, for every slot of a tensor.")
]
Tag = Annotated[
    str | None, typer.Option(help="Name of the checkpoint, if the directory has several.")
]


def open_any(
    url: str,
    *,
    rules: str | None = None,
    rename: str | None = None,
    tag: str | None = None,
    memory_bytes: int | None = None,
) -> Checkpoint:
    """Open the checkpoint at a directory or URL, in any known format.

    Args:
        rules: File of rules, or a family.
        tag: Which one, if there are several.
        memory_bytes: See ``open_source``.
    """
    return open_all([url], rules=rules, rename=rename, tag=tag, memory_bytes=memory_bytes)[0]


def open_all(
    urls: Sequence[str],
    *,
    rules: str | None = None,
    rename: str | None = None,
    tag: str | None = None,
    memory_bytes: int | None = None,
) -> list[Checkpoint]:
    """Open several checkpoints; each rule and renaming must match a name in one of them."""
    from ucp_core.formats import open_source

    places = [open_store(url) for url in urls]
    read = read_rules(rules)
    share = None if memory_bytes is None else memory_bytes // len(places)
    opened = [open_source(*place, rules=read, tag=tag, memory_bytes=share) for place in places]
    names = [names_of(each) for each in opened]
    known = set().union(*names)
    if rename is not None:
        from dataclasses import replace

        from ucp_core.language import load_renames
        from ucp_core.language import rename as rename_manifest

        renames = load_renames(_text(rename), rename)
        renames.refuse_idle(known)
        opened = [
            replace(each, manifest=rename_manifest(each.manifest, renames.mapping(sorted(fqns))))
            for each, fqns in zip(opened, names, strict=True)
        ]
        known |= set(renames.mapping(sorted(known)).values())
    if read is not None:
        read.refuse_idle(known)
    return opened


def names_of(opened: Checkpoint) -> set[str]:
    """Return the names of all tensors, including tied ones."""
    return {key.fqn for key in opened.state_map.entries} | {*opened.manifest.ties}


def read_rules(file: str | None) -> Rules | None:
    """Return the rules of a file or of a built-in family."""
    if file is None:
        return None
    from ucp_core.language import builtin_names, builtin_rules, load_rules

    if file in builtin_names():
        return builtin_rules(file)
    return load_rules(_text(file), file)


def _text(file: str) -> str:
    store, path = open_store(file)
    try:
        return store.read(path).decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file} is not a text file: {error}") from error


def size(text: str) -> int:
    """Parse an option such as ``512MiB`` into bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def memory_size(text: str) -> int:
    """Parse a memory limit into bytes; it must leave room for a few blocks."""
    from ucp_core.native import MEMORY_BYTES_MIN

    num_bytes = size(text)
    if num_bytes < MEMORY_BYTES_MIN:
        raise typer.BadParameter(f"{text!r} is too small: give at least {MEMORY_BYTES_MIN} bytes")
    return num_bytes


def print_json(value: Any) -> None:
    """Print a value as JSON, for programs."""
    typer.echo(json.dumps(value, indent=1))


def print_facts(facts: dict[str, Any]) -> None:
    """Print named values for people, one per line; leave out empty and unknown ones."""
    for name, value in facts.items():
        if value not in (None, "", [], {}):
            typer.echo(f"{name:<13} {_fact(value)}")


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_fact, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_nested(item)}" for name, item in value.items()) or "-"
    return f"{value:.9g}" if isinstance(value, float | complex) else str(value)


def _nested(value: Any) -> str:
    return f"({_fact(value)})" if isinstance(value, list | dict) else _fact(value)


@contextmanager
def progress(what: str, *, as_json: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar with rate and time left on a terminal; otherwise yield None."""
    if as_json or not sys.stderr.isatty():
        yield None
        return
    # rich takes 50 ms to import, and programs never need it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )

    class RateColumn(ProgressColumn):
        """Shows the rate in the units of the size; rich's own column mixes MB with MiB."""

        def render(self, task: Task) -> str:
            speed = task.finished_speed or task.speed
            return "?" if speed is None else f"{format_bytes(int(speed))}/s"

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        RateColumn(),
        TimeRemainingColumn(),
    )
    # A refresh thread would keep ``convert`` from forking.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    next_s = 0.0

    def show(done: int, total: int) -> None:
        nonlocal next_s
        bar.update(task, completed=done, total=total)
        if done >= total or time.monotonic() >= next_s:
            next_s = time.monotonic() + _REFRESH_S
            bar.refresh()

    with bar:
        task = bar.add_task(what, total=None)
        yield show
