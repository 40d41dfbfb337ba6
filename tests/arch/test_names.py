"""Where files lie and what they are called."""

from __future__ import annotations

from tests.arch.tree import PACKAGES, ROOT, python_files, relative

#: Folders of tests/unit that mirror no package.
OTHER_UNITS = {"benchmarks"}


def test_no_file_hides_behind_an_underscore() -> None:
    """What a room offers is in `__all__` of its `__init__.py`; a file name says what is inside."""
    hidden = [
        relative(path)
        for path in python_files(*PACKAGES)
        if path.name.startswith("_") and not path.name.startswith("__")
    ]

    assert hidden == []


def test_unit_tests_mirror_the_packages() -> None:
    """A folder that moved leaves its tests behind, where nobody looks for them."""
    units = ROOT / "tests/unit"
    folders = {path.parent.relative_to(units) for path in units.rglob("test_*.py")}
    strays = [
        f"tests/unit/{folder}"
        for folder in sorted(folders)
        if folder.parts[0] not in OTHER_UNITS and not (ROOT / folder).is_dir()
    ]

    assert strays == []
