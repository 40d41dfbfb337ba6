"""What the commands of ``ucp`` share: options, sizes, progress, and how a source is opened."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ucp_core.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucp_core.language import Rules
    from ucp_core.native import Checkpoint

#: How often a bar moves.
_REFRESH_S = 0.1
EXIT_CHECKPOINT = 1
EXIT_USAGE = 2
EXIT_STORAGE = 3

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6}
_UNITS |= {"GB": 10**9, "B": 1}

Source = Annotated[
    str, typer.Argument(help="Directory or URL of a checkpoint; its format is recognised.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Memory = Annotated[str, typer.Option(help="Bound of the buffers, such as 512MiB or 2GB.")]
RulesFile = Annotated[
    str | None,
    typer.Option("--rules", help="File of rules, or a family such as llama: how tensors were cut."),
]
RenameFile = Annotated[
    str | None, typer.Option("--rename", help="File of renamings, for every slot of a tensor.")
]
Tag = Annotated[str | None, typer.Option(help="Which of several checkpoints in the directory.")]


def open_any(
    url: str, *, rules: str | None = None, rename: str | None = None, tag: str | None = None
) -> Checkpoint:
    """Return the checkpoint at ``url``, of whatever known format.

    Args:
        url: Directory or fsspec URL.
        rules: File of rules.
        rename: File of renamings.
        tag: Which of several.
    """
    return open_all([url], rules=rules, rename=rename, tag=tag)[0]


def open_all(
    urls: Sequence[str],
    *,
    rules: str | None = None,
    rename: str | None = None,
    tag: str | None = None,
) -> list[Checkpoint]:
    """Return several checkpoints; a rule and a renaming have to match a name of one of them."""
    from ucp_core.formats import open_source

    places = [open_store(url) for url in urls]
    read = read_rules(rules)
    opened = [open_source(*place, rules=read, tag=tag) for place in places]
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
        # A plan asks the same rules how the target cuts what has its new name by then.
        known |= set(renames.mapping(sorted(known)).values())
    if read is not None:
        read.refuse_idle(known)
    return opened


def names_of(opened: Checkpoint) -> set[str]:
    """Return the names of all tensors, those that are tied to others too."""
    return {key.fqn for key in opened.state_map.entries} | {*opened.manifest.ties}


def read_rules(file: str | None) -> Rules | None:
    """Return the rules of a file, or of a family that ships."""
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
        raise typer.BadParameter(f"{file} is not a text: {error}") from error


def print_json(value: Any) -> None:
    """Print a value for programs."""
    typer.echo(json.dumps(value, indent=1))


def size(text: str) -> int:
    """Return the bytes that ``512MiB`` and its like mean."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise typer.BadParameter(f"{text!r} is not a size: give a number and one of {units}")
    return int(float(match[1]) * _UNITS[match[2]])


def memory_size(text: str) -> int:
    """Return the bytes of a bound of memory that can be kept."""
    # Of 8 blocks; not from where it is used, which imports numpy.
    from ucp_core.numerics import BLOCK_BYTES

    memory_bytes_min = 8 * BLOCK_BYTES
    num_bytes = size(text)
    if num_bytes < memory_bytes_min:
        raise typer.BadParameter(f"{text!r} is too small: give at least {memory_bytes_min} bytes")
    return num_bytes


def human(num_bytes: int) -> str:
    """Return a number of bytes as people read it."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - the step between units
            return f"{value:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1024
    return f"{value:.1f} TiB"


@contextmanager
def progress(what: str, *, as_json: bool) -> Iterator[Callable[[int, int], None] | None]:
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
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )

    class RateColumn(ProgressColumn):
        """rich's own counts in MB beside a size in MiB."""

        def render(self, task: Task) -> str:
            speed = task.finished_speed or task.speed
            return "?" if speed is None else f"{human(int(speed))}/s"

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        RateColumn(),
        TimeRemainingColumn(),
    )
    # A thread that refreshes the bar would keep ``convert`` from forking.
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
