"""The configuration explained: a JSON schema for editors, and a YAML with every key and default.

Both take the meaning of each key from the docstring of its section.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from textwrap import wrap
from typing import Any, Final

from orchestrator.config.schema import RunConfig

_TITLE: Final = "An everstep run"
#: JSON Schema's draft, as pydantic writes it.
_DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTES: Final = "\n\nAttributes:\n"
_WIDTH: Final = 96


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration; each key has its meaning as ``description``.

    A section may be empty, as ``commented_yaml`` leaves it.
    """
    sections = {
        name: {"anyOf": [key, {"type": "null"}], "description": key["description"]}
        if "$ref" in key and name not in _schema()["required"]
        else key
        for name, key in _schema()["properties"].items()
    }
    return {"$schema": _DRAFT, **_schema(), "title": _TITLE, "properties": sections}


@cache
def _schema() -> dict[str, Any]:
    schema = RunConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        section["description"], _, entries = section["description"].partition(_ATTRIBUTES)
        for name, meaning in _entries(entries):
            section["properties"][name]["description"] = meaning
        for key in section["properties"].values():
            key.pop("title", None)  # repeats the name
    # The purpose of a section, at the key that holds it.
    for key in schema["properties"].values():
        key.setdefault("description", _section(schema, key).get("description", ""))
    return schema


def commented_yaml(
    values: Mapping[str, Any], *, schema_file: str, of_script: Collection[str] = ()
) -> str:
    """Return a configuration with every key, its meaning, and its default after a ``#``.

    Args:
        values: Settings to write into it, by ``section.key``; they include the required keys.
        schema_file: The file with ``json_schema()``, relative to the configuration.
        of_script: Settings that the script decides.
    """
    schema = _schema()
    lines = [
        f"# yaml-language-server: $schema={schema_file}",
        "# To set a key, remove the # directly before its name.",
    ]
    for name, key in schema["properties"].items():
        lines += ["", *_key(schema, name, key, name, values, of_script)]
    return "\n".join(lines) + "\n"


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the meaning of each entry of a docstring's ``Attributes``."""
    for entry in re.split(r"\n {4}(?=\w)", f"\n{text}")[1:]:
        name, _, meaning = entry.partition(":")
        yield name, " ".join(meaning.split()).replace("``", "`")


def _section(schema: Mapping[str, Any], key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section under a key, or that of its list's elements; {} for a plain value."""
    branches = (key, key.get("items", {}), *key.get("anyOf", ()))
    name = next((one["$ref"].rpartition("/")[2] for one in branches if "$ref" in one), "")
    found: dict[str, Any] = schema["$defs"].get(name, {})
    return found


def _key(
    schema: Mapping[str, Any],
    name: str,
    key: Mapping[str, Any],
    path: str,
    values: Mapping[str, Any],
    of_script: Collection[str],
) -> Iterator[str]:
    """Yield the lines of one key, and of the keys in it if it is a section."""
    indent = "  " * path.count(".")
    section, meaning = _section(schema, key), key.get("description", "")
    if section and "$ref" not in key:
        meaning = f"{meaning} Keys: {', '.join(section['properties'])}.".strip()
    for paragraph in meaning.replace("``", "`").split("\n\n"):
        for line in wrap(" ".join(paragraph.split()), _WIDTH - len(indent)):
            yield f"{indent}# {line}"
    if "$ref" in key:
        # An empty section means its defaults.
        yield f"{indent}{'#' if indent else ''}{name}:"
        for inner, one in section["properties"].items():
            yield from _key(schema, inner, one, f"{path}.{inner}", values, of_script)
    elif path in of_script:
        yield f"{indent}# Left out: the script's own argument decides."
        yield f"{indent}#{name}: {_value(key.get('default', {}))}"
    elif path in values:
        yield f"{indent}{name}: {_value(values[path])}"
    else:
        yield f"{indent}#{name}: {_value(key.get('default', {}))}"


def _value(value: Any) -> str:
    """Return a value as YAML, which is JSON except for numbers such as ``1e-08``."""
    return re.sub(r"\b(\d+)(e-?\d+)", r"\1.0\2", json.dumps(value))
