"""Limits that ruff cannot count: it knows statements, these are lines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.arch._tree import PACKAGES, python_files, relative

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 800


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_a_file_fits_in_one_reading(path: Path) -> None:
    """Files grow a line at a time and nobody sees the moment at which they got too long."""
    lines = len(path.read_text(encoding="utf-8").splitlines())

    assert lines <= FILE_LINES_MAX, f"{relative(path)}: {lines} lines, at most {FILE_LINES_MAX}"


@pytest.mark.parametrize("path", python_files(*PACKAGES), ids=relative)
def test_a_function_fits_on_one_screen(path: Path) -> None:
    """A function of 40 statements (ruff's limit) can still be 200 lines of literals."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    too_long = [
        f"{relative(path)}:{node.lineno} {node.name}: {_lines(node)} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if _lines(node) > FUNCTION_LINES_MAX
    ]

    assert not too_long, "\n".join(too_long)


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1
