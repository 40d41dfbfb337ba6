"""Texts that no file may have, and files and names that each package must have."""

import importlib
import re
from pathlib import Path

import pytest

from tests.arch.tree import PACKAGES, ROOT, project_files, python_files, relative

#: Somebody's home, somebody's workplace, somebody's package registry.
FORBIDDEN = {
    "a home directory": re.compile(r"/(?:home|Users)/[a-z][\w.-]*/|/root/"),
    "a package registry": re.compile(r"(?:--(?:extra-)?index-url|--trusted-host|PIP_INDEX_URL)"),
    "an unfinished thought": re.compile(r"\b(?:XXX|FIXME)\b"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_tells_of_one_machine(what: str) -> None:
    """Paths and hosts of the machine that wrote a file exist there only; binary files count."""
    pattern = FORBIDDEN[what]
    found = [
        f"{relative(path)}:{number}: {line.strip()[:100]}"
        for path in project_files()
        if path != Path(__file__)
        for number, line in enumerate(_lines(path), start=1)
        if pattern.search(line)
    ]

    assert not found, f"{what} is named in:\n" + "\n".join(found)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def test_no_python_lives_in_cluster_configs() -> None:
    """No test would run code beside configuration."""
    strays = [
        relative(path)
        for path in (ROOT / "cluster_configs").rglob("*")
        if path.is_file()
        and path.suffix not in {".yaml", ".md", ".sbatch"}
        and not path.name.startswith("Dockerfile")
    ]

    assert strays == []


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_exist(package: str) -> None:
    """A name left in ``__all__`` after a rename breaks ``import *`` and the docs, nothing else."""
    for init in sorted((ROOT / package).rglob("__init__.py")):
        name = relative(init.parent).replace("/", ".")
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", [])
        missing = [item for item in exported if not hasattr(module, item)]

        assert not missing, f"{name}.__all__ lists {missing}, which {name} does not have"
        assert len(exported) == len(set(exported)), f"{name}.__all__ lists a name twice"


def test_only_two_processes_start_clusters() -> None:
    """``make test`` gives a process to each of the first two folders; more starve each other."""
    starting = re.compile(r"import [r]ay\b|Hosted[C]luster")
    folders = ("tests/integration/cluster/", "tests/integration/own_cluster/")
    # The last two are not part of it.
    places = (*folders, "tests/chaos/", "tests/benchmarks/")
    found = [
        relative(path)
        for path in python_files("tests")
        if starting.search(path.read_text(encoding="utf-8"))
    ]

    assert all(any(name.startswith(folder) for name in found) for folder in folders)
    assert not [name for name in found if not name.startswith(places)]


def test_warnings_are_sentences() -> None:
    """Without a set-up Python prints the message alone; ``not_stored`` says no reason."""
    bare = re.compile(r"\blog\.(?:warning|error|critical|exception)\(\s*\"\w*\"")
    found = [
        f"{relative(path)}: {match[0]}"
        for package in PACKAGES
        for path in python_files(package)
        for match in bare.finditer(path.read_text(encoding="utf-8"))
    ]

    assert found == []
