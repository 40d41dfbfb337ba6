"""Losses that draw noise or masks, and rates by shape, are those of one worker in each layout."""

import pytest

from tests.support import train_numbers
from tests.support.attempts import curve, finish, newest, of_script, reset
from tests.support.trainers import Run, Trainer
from ucp_core.layout import ParallelLayout
from workers.settings import Settings

pytestmark = pytest.mark.timeout(600)

RTOL = 1e-6
LAYOUTS = [
    ParallelLayout(dp_shard=2),
    *(ParallelLayout(**{axis: 2}) for axis in ("tp", "pp", "cp")),
]
MORE = [
    ParallelLayout(dp_shard=4),
    ParallelLayout(cp=2, pp=2),
    ParallelLayout(tp=2, cp=2),
    ParallelLayout(tp=2, pp=2),
]


def settings(*arguments: str) -> Settings:
    return of_script(train_numbers.__file__, *arguments, warmup_steps=2, **train_numbers.TRAIN)


def losses(run: Run) -> list[float]:
    return [loss for _, (loss, _) in sorted(curve(run.directory).items())]


def with_a_kill(run: Run, name: str, layout: ParallelLayout) -> list[float]:
    """Train in a layout whose last rank dies in a step, and go on with another worker."""
    reset(run)
    died = run.directory / f"died-{name}-{layout}"
    chosen = settings(name, f"die={died}")
    members = run.begin(chosen, num_workers=layout.world_size, layout=layout)
    members[-1].process.join()
    assert died.exists()
    for member in members[:-1]:
        member.fence(len(run.lineage))
        member.left()
    members[-1].close()
    run.trainers[layout.world_size - 1] = Trainer(f"n{len(run.lineage)}", run.directory)
    resume = newest(run)
    assert 0 < resume[0] < train_numbers.DIE_STEP
    finish(run, chosen, num_workers=layout.world_size, layout=layout, resume=resume)
    return losses(run)


def compare_with_one_worker(run: Run, name: str, layouts: list[ParallelLayout]) -> None:
    finish(run, settings(name, "die=/"), num_workers=1)
    alone = losses(run)
    assert len(alone) == train_numbers.TRAIN["steps"]
    apart = {}
    for layout in layouts:
        found = with_a_kill(run, name, layout)
        pairs = zip(found, alone, strict=True)
        apart[str(layout)] = max(abs(one - other) / other for one, other in pairs)
    assert max(apart.values()) <= RTOL, apart


#: Ranks with parts of sequences draw other numbers behind the model than one with all of them.
NAMES = [name for name in train_numbers.LOSSES if name != "behind"]


@pytest.mark.parametrize(
    ("name", "layouts"),
    [*((name, LAYOUTS) for name in NAMES), ("behind", LAYOUTS[:3])],
    ids=[*NAMES, "behind"],
)
def test_losses_with_a_kill_are_those_of_one_worker(
    run: Run, name: str, layouts: list[ParallelLayout]
) -> None:
    """Noise, masks and rates by shape depended on the stage, on the part, or on the shards."""
    compare_with_one_worker(run, name, layouts)


@pytest.mark.chaos
@pytest.mark.parametrize("name", NAMES)
def test_losses_of_four_workers_are_those_of_one(run: Run, name: str) -> None:
    """Two axes at once cut noise and masks in two ways."""
    compare_with_one_worker(run, name, MORE)
