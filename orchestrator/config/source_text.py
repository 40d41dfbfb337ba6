"""The text of a configuration: YAML, and ``section.key=value`` overrides."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ucp_core.errors import Place, Problem
from ucp_core.yaml_places import YamlText

#: The folder that Ray unpacks a job's files into.
_JOB_FOLDER = "working_dir_files"
COMMAND_LINE = Place("command line")


class Source(YamlText):
    """A configuration's text as a document, and the place of each key."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        #: The values of the text and the overrides; empty if the text is not a mapping.
        self.document: dict[str, Any] = self.value if isinstance(self.value, dict) else {}
        if self.root is not None and not isinstance(self.root, yaml.MappingNode):
            self.problems.append(Problem("", "must be a mapping of sections", Place(name)))

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
    return text if read.problems else read.value


def why_absent(path: str) -> str:
    """Return why a Ray job may lack a file, to append to a message; "" if the file is there."""
    if "://" in path or _JOB_FOLDER not in Path.cwd().parts or Path(path).exists():
        return ""
    return (
        ". A Ray job brings the folder of --working-dir only. `ray job submit` leaves out "
        "files that .gitignore names, unless RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 is set where "
        "you submit, and files that `excludes` of the runtime environment names"
    )
