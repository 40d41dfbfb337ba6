"""Where files lie and what they are called."""

import re

from tests.arch.tree import PACKAGES, ROOT, python_files, relative

#: Folders of tests/unit that mirror no package.
OTHER_UNITS = {"benchmarks"}


def test_no_file_hides_behind_an_underscore() -> None:
    """A room offers what its `__init__.py` imports; a file name says what is inside."""
    hidden = [
        relative(path)
        for path in python_files(*PACKAGES)
        if path.name.startswith("_") and not path.name.startswith("__")
    ]

    assert hidden == []


def test_unit_tests_mirror_the_packages() -> None:
    """A folder that moved leaves its tests in an unexpected place."""
    units = ROOT / "tests/unit"
    folders = {path.parent.relative_to(units) for path in units.rglob("test_*.py")}
    strays = [
        f"tests/unit/{folder}"
        for folder in sorted(folders)
        if folder.parts[0] not in OTHER_UNITS and not (ROOT / folder).is_dir()
    ]

    assert strays == []


def test_names_that_torch_does_not_promise_are_in_one_file_a_room() -> None:
    """A move to another torch starts with these files, and the tests of the names in them."""
    private = re.compile(
        r"^(from torch\S* import .*\b_[a-z]\w+|from torch\S*\._\S* import|import torch\S*\._)"
        r"|\bdistributed_c10d\._|torch\._C\b|^from torch\S* import .*distributed_c10d"
    )
    found = [
        f"{relative(path)}:{number}"
        for path in python_files("workers", "orchestrator")
        if path.name != "torch_names.py"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if private.search(line)
    ]

    assert found == []
