"""Runs ``ucp`` up to its exit, in this process where that makes no difference."""

import contextlib
import io
import subprocess
import sys
from typing import NamedTuple
from unittest.mock import patch

from ucp_core.cli import main


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def ucp(*arguments: str) -> Done:
    """Run the command's entry point with the arguments of a process."""
    if arguments[:1] == ("convert",):
        # It bounds the memory of its whole process, and this one holds all that was tested before.
        command = [sys.executable, "-m", "ucp_core.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return Done(done.returncode, done.stdout, done.stderr)
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        patch.object(sys, "argv", ["ucp", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return Done(int(str(code or 0)), out.getvalue(), err.getvalue())
