"""The import contracts read code; these start an interpreter and look at what it really loaded."""

import subprocess
import sys
from pathlib import Path

from tests.arch.tree import ROOT, python_files, relative

#: Frameworks that a pure module must not pull in, not even through somebody else.
FRAMEWORKS = ("ray", "torch", "fsspec", "yaml", "pydantic", "numpy")

PURE_FOLDERS = (
    "orchestrator/core",
    "orchestrator/policies",
    "orchestrator/detection",
    "orchestrator/diagnosis",
    "orchestrator/traffic",
)
PURE_FILES = (
    "orchestrator/fault_kinds.py",
    "workers/protocol.py",
    "workers/memory/retention.py",
    "workers/snapshot/final.py",
    "ucp_core/layout.py",
    "ucp_core/lineage.py",
    "ucp_core/geometry/boxes.py",
    "ucp_core/geometry/statemap.py",
    "ucp_core/reading/planning.py",
    "ucp_core/manifest/document.py",
    "ucp_core/language/patterns.py",
    "ucp_core/language/rules.py",
)


def _module(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _pure_modules() -> list[str]:
    paths = [path for folder in PURE_FOLDERS for path in python_files(folder)]
    paths += [ROOT / name for name in PURE_FILES]
    return [_module(path) for path in paths]


def _loaded_after(statement: str, names: tuple[str, ...]) -> set[str]:
    probe = f"{statement}\nimport sys\nprint(*(set({names!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, f"{statement} failed:\n{done.stderr}"
    return set(done.stdout.split())


def test_pure_modules_load_no_framework() -> None:
    """``import a.b`` runs ``a/__init__.py`` too: one careless line there makes all of it heavy."""
    imports = "\n".join(f"import {name}" for name in _pure_modules())

    assert _loaded_after(imports, FRAMEWORKS) == set()


def test_ucp_core_works_without_the_other_packages_and_their_frameworks() -> None:
    """A checkpoint must be readable where neither Ray nor torch is installed."""
    modules = [_module(path) for path in python_files("ucp_core")]
    imports = "\n".join(f"import {name}" for name in modules)

    assert _loaded_after(imports, ("ray", "torch", "workers", "orchestrator")) == set()


def test_workers_do_not_need_the_orchestrator() -> None:
    """A dead controller must not break training, so nothing of it may be loaded in a worker."""
    assert (
        _loaded_after("import workers.protocol, workers.process.actor", ("orchestrator",)) == set()
    )


#: Modules that ``everstep --help`` may load: its lines of help, exit codes and errors.
HELP_MAY_LOAD = {
    "orchestrator",
    "orchestrator.cli",
    "orchestrator.cli.exit_codes",
    "orchestrator.cli.main",
    "orchestrator.driver",
    "orchestrator.driver.signals",
    "orchestrator.errors",
    "ucp_core",
    "ucp_core.errors",
    "ucp_core.lazy",
    "workers",
    "workers.errors",
    "workers.launchers",
}


def test_help_loads_no_framework_and_little_of_ours() -> None:
    """The default name of a file stood beside the schema, and brought pydantic and the core."""
    probe = (
        "import contextlib, io, sys\nfrom orchestrator.cli.main import app\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    app(['--help'])\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, check=True, text=True
    )
    loaded = set(done.stdout.split())

    ours = {
        name for name in loaded if name.split(".")[0] in ("orchestrator", "workers", "ucp_core")
    }
    assert ours <= HELP_MAY_LOAD, ours - HELP_MAY_LOAD
    assert not loaded & {*FRAMEWORKS, "psutil", "prometheus_client", "aiohttp"}
