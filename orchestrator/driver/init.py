"""``everstep init``: write a configuration to start with, and the schema that editors read."""

import ast
import contextlib
import json
from pathlib import Path
from typing import Any, Final

from orchestrator.config import commented_yaml, json_schema
from orchestrator.driver.asking import DECIDED, TRAINER
from orchestrator.errors import ConfigError

_SCHEMA: Final = "everstep.schema.json"
#: Arguments of a script's call that are settings of the run.
_OF_RUN: Final = {
    "directory": "run.directory", "output_dir": "run.directory", "init_from": "run.init_from",
}  # fmt: skip
_CALLS: Final = ("run", "TrainingArguments")


def init_config(script: str | None, to: str) -> dict[str, str]:
    """Write a commented configuration to ``to``, and its schema beside it; return both paths.

    Args:
        script: The training script; literal arguments of its ``everstep.run`` are copied. None for
            the built-in language model on Python's own library.
        to: A file that does not exist yet.

    Raises:
        ConfigError: ``to`` exists, or the script does not exist or is not Python.
    """
    place = Path(to)
    if place.exists():
        raise ConfigError(f"{to} already exists; name another file by --to, or edit it")
    values: dict[str, Any] = {
        "run.directory": "runs/first",
        "workers.max": 2,
        "train.steps": 200,
        "train.global_batch": 16,
        "train.micro_batch": 2,
    }
    left_out: list[str] = []
    if script is not None:
        values |= {"run.script": script, **_arguments(Path(script))}
        left_out = [key for key, value in values.items() if value is None]
        values = {key: value for key, value in values.items() if value is not None}
    place.parent.mkdir(parents=True, exist_ok=True)
    schema = place.with_name(_SCHEMA)
    schema.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
    text = commented_yaml(values, schema_file=_SCHEMA, of_script=left_out)
    place.write_text(text, encoding="utf-8")
    return {"config": to, "schema": str(schema)}


def _arguments(script: Path) -> dict[str, Any]:
    """Return the settings in a script's call of ``everstep.run``, by ``section.key``.

    A name counts if the module assigns it a literal. Other values, and settings that Trainer's
    arguments decide, are None: the run asks the script for them when it starts.
    """
    try:
        text = script.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{script} cannot be read as a script: {error}") from error
    names = {
        target.id: one.value
        for one in tree.body
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    known = json_schema()["$defs"]["TrainSettings"]["properties"]
    found: dict[str, Any] = dict.fromkeys(DECIDED) if TRAINER in text else {}
    for call in ast.walk(tree):
        if (
            not isinstance(call, ast.Call)
            or ast.unparse(call.func).rpartition(".")[2] not in _CALLS
        ):
            continue
        for given in call.keywords:
            key = _OF_RUN.get(given.arg or "", f"train.{given.arg}" if given.arg in known else "")
            value = given.value
            value = names.get(value.id, value) if isinstance(value, ast.Name) else value
            with contextlib.suppress(ValueError):
                found |= {key: ast.literal_eval(value)} if key else {}
                continue
            found |= {key: None} if key in DECIDED else {}
    return found
