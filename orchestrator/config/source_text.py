"""Where a configuration comes from: YAML text and ``section.key=value`` overrides.

``orchestrator.config.loading`` uses this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from ucp_core.errors import Place, Problem
from ucp_core.yaml_places import YamlText, dotted

#: The folder that Ray unpacks a job's files into.
_JOB_FOLDER = "working_dir_files"
COMMAND_LINE = Place("command line")
#: Keys from the root, as in ``("train", "lr")``.
KeyPath: TypeAlias = tuple[str | int, ...]


class Source(YamlText):
    """A configuration's text as a document, and the place of each key.

    Attributes:
        document: The values of the text and the overrides; empty if the text is no mapping.
        places: Where each key was written.
    """

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.document: dict[str, Any] = {}
        self.places: dict[KeyPath, Place] = {}
        if isinstance(self.root, yaml.MappingNode):
            self.document = self._plain(self.root, ())
        elif self.root is not None:
            self.problems.append(Problem("", "must be a mapping of sections", Place(name)))

    def _plain(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            pairs = self.pairs(node, *path)
            self.places |= {(*path, key): place for key, (place, _) in pairs.items()}
            return {key: self._plain(value, (*path, key)) for key, (_, value) in pairs.items()}
        if isinstance(node, yaml.SequenceNode):
            self.places |= {(*path, i): self.place(item) for i, item in enumerate(node.value)}
            return [self._plain(item, (*path, i)) for i, item in enumerate(node.value)]
        return self.value(node)

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Return a problem at ``path``, where it or its nearest parent was written."""
        nearest = (self.places.get(path[:end]) for end in range(len(path), 0, -1))
        place = next((place for place in nearest if place), Place())
        return Problem(dotted(path), message, place)

    def assign(self, path: tuple[str, ...], value: Any) -> None:
        """Put a value of the command line into the document."""
        here = self.document
        for key in path[:-1]:
            if not isinstance(here.get(key), dict):
                here[key] = {}
            here = here[key]
        here[path[-1]] = value
        self.places[path] = COMMAND_LINE

    def override(self, assignments: Sequence[str]) -> None:
        """Apply ``section.key=value`` assignments in order; the last one wins."""
        for assignment in assignments:
            path_text, equals, value_text = assignment.partition("=")
            path = tuple(part.strip() for part in path_text.split("."))
            value = _parsed(value_text)
            is_list = len(path) == 1 and isinstance(value, list)
            if not equals or not all(path) or (len(path) == 1 and not is_list):
                message = "must read section.key=value, as in train.steps=200"
                self.problems.append(Problem(assignment, message, COMMAND_LINE))
            else:
                self.assign(path, value)


def _parsed(text: str) -> Any:
    """Return a value of the command line, read as YAML without comments."""
    plain = text.strip()
    if "#" in plain and plain[0] not in "'\"[{":
        return plain
    read = YamlText(text, "")
    value = None if read.root is None else read.value(read.root)
    return text if read.problems else value


def why_absent(path: str) -> str:
    """Return what may have kept a file from a Ray job, to follow a message; "" if it is there."""
    if "://" in path or _JOB_FOLDER not in Path.cwd().parts or Path(path).exists():
        return ""
    return (
        ". A Ray job brings the folder of --working-dir only. `ray job submit` leaves out "
        "files that .gitignore names, unless RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 is set where "
        "you submit, and files that `excludes` of the runtime environment names"
    )
