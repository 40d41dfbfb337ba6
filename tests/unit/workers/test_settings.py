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
    """An author of a changed default or shape would otherwise learn of it from a user."""
    assert problems(Settings()) == []
    for name in PRESETS:
        assert problems(Settings(model=ModelSettings(preset=name))) == [], name


def test_all_problems_are_found_at_once() -> None:
    """Each part has its own check; one must not hide the next."""
    settings = Settings(
        model=ModelSettings(dim=100, num_heads=6),
        data=DataSettings(source="", validation_share=1.0, sequence_length=1),
        train=TrainSettings(
            global_batch=10, micro_batch=4, lr=-1.0, schedule="cosin", precision="fp16",  # type: ignore[arg-type]
            betas=(0.9, 1.0), steps=5, warmup_steps=6,
        ),
        checkpoint=CheckpointSettings(every_steps=0, keep=1),
        parallel=ParallelSettings(collective_timeout_s=float("nan")),
    )  # fmt: skip

    paths = [problem.split(":")[0] for problem in problems(settings)]

    assert paths == [
        "data.source",
        "data.sequence_length",
        "data.validation_share",
        "train.lr",
        "train.schedule",
        "train.betas.1",
        "train.precision",
        "checkpoint.every_steps",
        "parallel.collective_timeout_s",
        "model.num_heads",
        "train.global_batch",
        "train.warmup_steps",
        "checkpoint.keep",
    ]


def test_an_unknown_preset_is_answered_with_those_there_are() -> None:
    """Its sizes are not known, so no other check of the model can run."""
    (problem,) = problems(Settings(model=ModelSettings(preset="7b")))

    assert problem.startswith("model.preset: '7b' is none of tiny, small")


def test_given_sizes_replace_those_of_the_preset() -> None:
    """None means 'as the preset', so False must not be taken for None."""
    shape = model_shape(ModelSettings(preset="small", num_layers=7, tied=False))

    assert (shape.num_layers, shape.tied, shape.dim) == (7, False, PRESETS["small"].dim)
