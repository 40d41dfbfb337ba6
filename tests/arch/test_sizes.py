"""Limits that make a reader suspicious; ruff counts statements, these tests count lines."""

import ast

from tests.arch.tree import PACKAGES, python_files, relative

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 800


def test_a_file_fits_in_one_reading() -> None:
    """Split a file where a reader would split it, never only to pass this test."""
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    too_long = [
        f"{relative(path)}: {lines} lines, at most {FILE_LINES_MAX}"
        for path, lines in sizes.items()
        if lines > FILE_LINES_MAX
    ]

    assert not too_long, "\n".join(too_long)


def test_a_function_fits_on_one_screen() -> None:
    """A function of 40 statements (ruff's limit) can still be 200 lines of literals."""
    too_long = [
        f"{relative(path)}:{node.lineno} {node.name}: {lines} lines, at most {FUNCTION_LINES_MAX}"
        for path in python_files(*PACKAGES)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]

    assert not too_long, "\n".join(too_long)
