"""Installs everstep as somebody does who has no checkout: its wheel, in a fresh environment."""

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def build_wheel(directory: Path) -> Path:
    """Return the project's wheel, built into ``directory``."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", directory],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = directory.glob("*.whl")
    return built


class Installed:
    """An environment with the wheel and the packages of this interpreter, and no checkout."""

    def __init__(self, wheel: Path, directory: Path, *, without: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self._python = directory / "venv/bin/python"
        venv.create(directory / "venv", with_pip=False)
        (packages,) = (directory / "venv").glob("lib/python*/site-packages")
        for place in (Path(path) for path in sys.path if path.endswith("site-packages")):
            for found in place.iterdir():
                name = found.name.partition(".")[0].partition("-")[0]
                # An editable install has the examples in a folder of the package's name.
                is_ours = name == "orchestrator" or name.endswith(("everstep", "_tree"))
                if not (is_ours or name in without or (packages / found.name).exists()):
                    (packages / found.name).symlink_to(found)
        pip = [sys.executable, "-m", "pip", "--python", str(self._python)]
        install = [*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
        subprocess.run(install, check=True, capture_output=True)

    def begin(
        self,
        command: str,
        *arguments: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        **streams: Any,
    ) -> subprocess.Popen[str]:
        """Start one of the environment's commands, with the environment activated."""
        hidden = ("PYTHONPATH", "RAY_ADDRESS", "RAY_TMPDIR")
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        path = f"{self._python.parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            [self._python.with_name(command), *arguments],
            cwd=cwd or self.directory,
            env={**inherited, **(environment or {}), "PATH": path},
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        )

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of the environment's commands to its end."""
        with self.begin(command, *arguments) as process:
            output, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
