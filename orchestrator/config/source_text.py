"""Where a configuration comes from: YAML text and ``section.key=value`` overrides.

It keeps the place of every key, so that a problem can name the line to edit.
``orchestrator.config.loading`` uses this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import yaml

#: The folder that Ray unpacks a job's files into.
_JOB_FOLDER = "working_dir_files"
#: Keys from the root, as in ``("train", "lr")``.
KeyPath: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
        path: The key, such as ``train.lr``; "" for the whole document.
        message: What is wrong and what would be right.
        where: ``file.yaml:12`` or ``command line``; "" if the key is written nowhere.
    """

    path: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        """Return it as one line for people."""
        return ": ".join(part for part in (self.where, self.path, self.message) if part)


@dataclass(slots=True, kw_only=True)
class Source:
    """A parsed document, the place of each key, and the problems of its form."""

    name: str
    document: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath) -> str:
        """Return where ``path`` or its nearest parent was written; "" if nowhere."""
        while path:
            if path in self.places:
                return self.places[path]
            path = path[:-1]
        return ""

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Return a problem at ``path`` with its place."""
        return Problem(path=dotted(path), message=message, where=self.place(path))


def dotted(path: KeyPath) -> str:
    """Return ``("train", "lr")`` as ``train.lr``."""
    return ".".join(str(part) for part in path)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown ``word``: the nearest known word, or all of them."""
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    return f"known here: {', '.join(sorted(known))}"


def parse(text: str, *, name: str) -> Source:
    """Return the mapping in YAML ``text``, with its problems; it never raises.

    A key that is written twice is a problem, because YAML would silently keep the last one.
    """
    source = Source(name=name)
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return source
        if not isinstance(root, yaml.MappingNode):
            source.problems.append(
                Problem(path="", message="must be a mapping of sections", where=name)
            )
            return source
        source.document = _value(loader, root, (), source)
    except yaml.YAMLError as error:
        source.problems.append(_syntax_problem(error, name))
    finally:
        loader.dispose()
    return source


def override(source: Source, assignments: Sequence[str]) -> None:
    """Apply ``section.key=value`` assignments in order; the last one wins."""
    for assignment in assignments:
        path_text, equals, value_text = assignment.partition("=")
        path = tuple(part.strip() for part in path_text.split("."))
        value = _parsed(value_text)
        is_list = len(path) == 1 and isinstance(value, list)
        if not equals or not all(path) or (len(path) == 1 and not is_list):
            source.problems.append(
                Problem(
                    path=assignment,
                    message="must read section.key=value, as in train.steps=200",
                    where="command line",
                )
            )
            continue
        _assign(source, path, value)


def _parsed(text: str) -> Any:
    """Return a value of the command line, read as YAML without comments."""
    plain = text.strip()
    if "#" in plain and plain[0] not in "'\"[{":
        return plain
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _assign(source: Source, path: tuple[str, ...], value: Any) -> None:
    here: dict[str, Any] = source.document
    for key in path[:-1]:
        below = here.get(key)
        if not isinstance(below, dict):
            below = {}
            here[key] = below
        here = below
    here[path[-1]] = value
    source.places[path] = "command line"


def _value(loader: yaml.SafeLoader, node: yaml.Node, path: KeyPath, source: Source) -> Any:
    source.places[path] = f"{source.name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            here = (*path, key)
            if key in mapping:
                source.problems.append(
                    Problem(
                        path=dotted(here),
                        message="is written twice; keep one of them",
                        where=f"{source.name}:{key_node.start_mark.line + 1}",
                    )
                )
            mapping[key] = _value(loader, value_node, here, source)
            source.places[here] = f"{source.name}:{key_node.start_mark.line + 1}"
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, (*path, i), source) for i, item in enumerate(node.value)]
    return loader.construct_object(node, deep=True)


def _syntax_problem(error: yaml.YAMLError, name: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    detail = getattr(error, "problem", None) or str(error)
    where = f"{name}:{mark.line + 1}" if mark is not None else name
    return Problem(path="", message=f"is not YAML: {detail}", where=where)


def why_absent(path: str) -> str:
    """Return what may have kept a file from a Ray job, to follow a message; "" if it is there."""
    if "://" in path or _JOB_FOLDER not in Path.cwd().parts or Path(path).exists():
        return ""
    return (
        ". A Ray job brings the folder of --working-dir only. `ray job submit` leaves out what "
        ".gitignore names, unless RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 is set where you submit, and "
        "what `excludes` of the runtime environment names"
    )
