"""The explanation of the configuration follows from it, so that nothing is told twice."""

import re
from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator.config import commented_yaml, json_schema, load

LEAST = {"run.directory": "runs/first", "workers.max": 2}


@pytest.fixture(autouse=True)
def _no_cluster_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def _text(**more: Any) -> str:
    return commented_yaml({**LEAST, **more}, schema_file="everstep.schema.json")


def test_every_key_is_there_with_its_default() -> None:
    """A default that is written down a second time is wrong some day."""
    text = _text()
    whole = re.sub(r"^( *)#(?! )", r"\1", text, flags=re.MULTILINE)
    shown, known = yaml.safe_load(whole), load(text).model_dump(mode="json")

    assert load(whole) == load(text)
    assert load(text) == load("run: {directory: runs/first}\nworkers: {max: 2}\n")
    assert shown.keys() == known.keys()
    for name, section in known.items():
        if isinstance(section, dict):
            assert shown[name].keys() == section.keys(), name


def test_what_is_set_is_set_and_one_key_can_be_set_alone() -> None:
    """A key that is set in a section without others must not belong to the section above."""
    text = _text(**{"run.script": "train.py", "train.eps": 1e-9})
    edited = text.replace("  #every_steps: 10", "  every_steps: 5")
    config = load(edited)

    assert config.run.script.endswith("/train.py")
    assert config.train.eps == 1e-9
    assert config.checkpoint.every_steps == 5
    assert max(map(len, text.splitlines())) <= 100


def test_editors_learn_what_each_key_means_and_which_ones_there_are() -> None:
    schema = json_schema()
    validator = jsonschema.Draft202012Validator(schema)

    for name, section in {"the file": schema, **schema["$defs"]}.items():
        for key, described in section["properties"].items():
            assert described.get("description"), f"{name}: {key}"
    assert not list(validator.iter_errors(yaml.safe_load(_text())))
    wrong = {"run": {"directory": "x"}, "workers": {"max": 0, "mx": 1}, "trian": {}}
    assert len(list(validator.iter_errors(wrong))) == 3
    assert _text().startswith("# yaml-language-server: $schema=everstep.schema.json\n")
