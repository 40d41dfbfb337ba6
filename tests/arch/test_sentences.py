"""Docstrings, comments, messages and pages are written in plain sentences."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.arch.tree import ROOT, project_files, python_files, relative

#: Words that open a sentence with its object, or with an actor without a name. A question may.
_OPENINGS: Final = re.compile(
    r"(?:^|[.!?:][\"'`)*]*\s+)(?:Who|What|Whom|Whoever|Whose|Of|Nor|Nobody)\b(?!.*?\?(?:\W|$))"
)
#: Words without an actor, and words that few readers use.
_WORDS: Final = re.compile(
    r"\b(?:nobody|is\s+told\s+of|is\s+waited\s+for|anew|of\s+late|any\s+more)\b", re.IGNORECASE
)
#: The same in the name of a function.
_NAMES: Final = re.compile(
    r"^\s*(?:async\s+)?def\s+(?:test_(?:who|whoever|whose|of|nor)_\w+"
    r"|\w*(?:nobody|_anew|_of_late|_any_more|is_told_of|is_waited_for)\w*)",
    re.MULTILINE,
)
#: Begins an item of a list or an entry such as ``name: meaning``.
_ITEM: Final = re.compile(r"\s*(?:[-*>#]+ |\d+\. |\*{0,2}[\w.`]+: |\| )")
_COMMENT: Final = re.compile(r"^(?P<code>\s*|.*\s{2})#:? (?P<text>.*)$")
_CODE: Final = re.compile(r"``.+?``|`[^`]+`")


class Paragraph(NamedTuple):
    """A paragraph of prose, on one line."""

    path: Path
    line: int
    text: str


def test_no_statement_begins_with_its_object() -> None:
    """A reader who meets the object first must keep it in mind until the verb explains it."""
    found = [
        f"{relative(each.path)}:{each.line}: {part}"
        for each in _paragraphs()
        for part in re.split(r"(?<=[.!?])[\"'`)*]*\s+", each.text)
        if _OPENINGS.search(part)
    ]

    assert not found, f"{len(found)} sentences:\n" + "\n".join(found)


def test_no_sentence_hides_who_acts() -> None:
    """Without an actor a reader cannot tell which part of the program does the work."""
    found = [
        f"{relative(each.path)}:{each.line}: {each.text}"
        for each in _paragraphs()
        if _WORDS.search(each.text)
    ]

    assert not found, f"{len(found)} paragraphs:\n" + "\n".join(found)


def test_no_name_hides_who_acts() -> None:
    """The name of a test is a claim, and is read in a report without its docstring."""
    found = [
        f"{relative(path)}: {name.strip()}"
        for path in python_files()
        for name in _NAMES.findall(path.read_text(encoding="utf-8"))
    ]

    assert not found, f"{len(found)} names:\n" + "\n".join(found)


@functools.cache
def _paragraphs() -> tuple[Paragraph, ...]:
    pages = [path for path in project_files() if path.suffix == ".md"]
    files = (*python_files(), *(ROOT / "dashboards").rglob("*.py"))
    of_pages = (each for path in pages for each in _of_page(path))
    of_files = (each for path in files for each in _of_python(path))
    return (*of_pages, *of_files)


def _of_page(path: Path) -> Iterator[Paragraph]:
    text = path.read_text(encoding="utf-8")
    prose = re.sub(r"^ *```.*?^ *```", _blank, text, flags=re.DOTALL | re.MULTILINE)
    for each in _split(path, 1, prose):
        for cell in each.text.split(" | "):
            yield each._replace(text=cell.strip("#*|>- "))


def _of_python(path: Path) -> Iterator[Paragraph]:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    in_formatted = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    in_strings: set[int] = set()
    for node in ast.walk(tree):
        text = None if id(node) in in_formatted else _text(node)
        if text is not None and isinstance(node, ast.expr):
            in_strings |= set(range(node.lineno + 1, (node.end_lineno or 0) + 1))
            if " " in text.strip():
                yield from _split(path, node.lineno, text)
    yield from _of_comments(path, source.split("\n"), in_strings)


def _of_comments(path: Path, lines: list[str], in_strings: set[int]) -> Iterator[Paragraph]:
    begun, block = 0, list[str]()
    for number, line in enumerate((*lines, ""), start=1):
        found = _COMMENT.match(line) if number not in in_strings else None
        continues = found is not None and not found["code"].strip() and block
        if block and not continues:
            yield from _split(path, begun, "\n".join(block))
            block = []
        if found is not None:
            begun = begun if block else number
            block.append(found["text"])


def _text(node: ast.AST) -> str | None:
    """Return the text of a string, with a stand-in for each value that is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [str(one.value) if isinstance(one, ast.Constant) else "x" for one in node.values]
        return "".join(parts)
    return None


def _split(path: Path, first: int, text: str) -> Iterator[Paragraph]:
    """Yield the paragraphs of a text, each with its line and without names of code."""
    begun, lines = first, list[str]()
    for number, line in enumerate((*text.split("\n"), ""), start=first):
        if lines and (not line.strip() or _ITEM.match(line)):
            yield Paragraph(path, begun, _CODE.sub("``", " ".join(lines)))
            lines = []
        if line.strip():
            begun = begun if lines else number
            lines.append(line.strip())


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")
