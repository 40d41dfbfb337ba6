from __future__ import annotations

import json

import pytest

from workers.errors import SettingsError
from workers.models import PRESETS
from workers.settings import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    ParallelSettings,
    Settings,
    TrainSettings,
    model_shape,
    problems,
)


def test_defaults_and_every_preset_are_without_problems() -> None:
    """Whoever changes a default or a shape would otherwise learn of it from a user."""
    assert problems(Settings()) == []
    for name in PRESETS:
        assert problems(Settings(model=ModelSettings(preset=name))) == [], name


def test_settings_survive_json() -> None:
    """Tuples become lists in JSON, and nested settings become dictionaries."""
    settings = Settings(
        model=ModelSettings(preset="10m", num_layers=3, tied=False),
        data=DataSettings(source="/data/*.jsonl", seed=4),
        train=TrainSettings(betas=(0.8, 0.99), deterministic=True),
        script="train.py",
    )

    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_every_unknown_name_is_told_with_its_path() -> None:
    """Stopping at the first would make the user try once per typing error."""
    document = {"train": {"step": 3}, "modle": {}, "data": {"sequence_length": 8}}

    with pytest.raises(SettingsError) as caught:
        Settings.from_json(document)

    assert [text.split(":")[0] for text in caught.value.facts["problems"]] == [
        "train.step",
        "modle",
    ]


def test_all_problems_are_found_at_once() -> None:
    """Each part has its own check; one must not hide the next."""
    settings = Settings(
        model=ModelSettings(dim=100, num_heads=6),
        data=DataSettings(source="", validation_share=1.0, sequence_length=1),
        train=TrainSettings(
            global_batch=10, micro_batch=4, lr=-1.0, schedule="cosin", precision="fp16",
            betas=(0.9, 1.0), steps=5, warmup_steps=6,
        ),
        checkpoint=CheckpointSettings(every_steps=0, keep=1),
        parallel=ParallelSettings(collective_timeout_s=float("nan")),
    )  # fmt: skip

    paths = [problem.split(":")[0] for problem in problems(settings)]

    assert paths == [
        "model.num_heads",
        "data.source",
        "data.sequence_length",
        "data.validation_share",
        "train.global_batch",
        "train.lr",
        "train.betas",
        "train.warmup_steps",
        "train.schedule",
        "train.precision",
        "checkpoint.every_steps",
        "checkpoint.keep",
        "parallel.collective_timeout_s",
    ]


def test_an_unknown_preset_is_answered_with_those_there_are() -> None:
    """Its sizes are not known, so no other check of the model can run."""
    (problem,) = problems(Settings(model=ModelSettings(preset="7b")))

    assert problem.startswith("model.preset: '7b' is none of tiny, small")


def test_given_sizes_replace_those_of_the_preset() -> None:
    """None means 'as the preset', so False must not be taken for None."""
    shape = model_shape(ModelSettings(preset="small", num_layers=7, tied=False))

    assert (shape.num_layers, shape.tied, shape.dim) == (7, False, PRESETS["small"].dim)
