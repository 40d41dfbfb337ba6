"""``ucp``: look into checkpoints, convert them, verify them.

Exit codes: 0 success; 1 the checkpoint is missing, damaged or unusable; 2 wrong usage (an option or
argument); 3 the storage refused. Errors are one line on stderr.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ucp_core.commands import EXIT_CHECKPOINT, EXIT_STORAGE, convert, inspect, tools
from ucp_core.errors import StorageError, UcpError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Look into checkpoints, convert them and verify them. "
    "Exit codes: 0 success, 1 missing or damaged checkpoint, 2 wrong usage, 3 storage refused.",
)
for module in (inspect, convert, tools):
    module.register(app)


def _version(*, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"ucp {version('everstep')}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_version),
    ] = False,
) -> None:
    """Take the options that stand before the command."""


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


if __name__ == "__main__":
    main()
