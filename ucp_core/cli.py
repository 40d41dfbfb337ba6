"""``ucp``: look into checkpoints, convert them, verify them.

Exit codes: 0 success; 1 the checkpoint is missing, damaged or unusable; 2 wrong usage (an option or
argument); 3 the storage refused. Errors are one line on stderr.
"""

import sys
from typing import Annotated

import typer

from ucp_core.commands import EXIT_CHECKPOINT, EXIT_STORAGE, app
from ucp_core.errors import StorageError, UcpError

__all__ = ["app", "main"]


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
    """Take the options before the command."""


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
