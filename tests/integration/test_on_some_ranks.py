"""Scripts that do something only on some workers, on real ones."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.attempts import lines, newest, of_script, result, small_units
from tests.support.trainers import Run
from ucp_core import open as open_any
from ucp_core.layout import ParallelLayout
from workers.protocol import Completed, Outcome, Raised
from workers.settings import Settings

SCRIPT = Path(__file__).parents[1] / "support/train_told.py"
#: The width of the model; and each rank looks at all samples behind each step, as nanoGPT does.
ODD = ("width=5", "evaluate")


def script(*arguments: str, odd: tuple[str, ...] = ODD, **train: Any) -> Settings:
    chosen: dict[str, Any] = {"steps": 8, "global_batch": 8, "micro_batch": 2, **train}
    return of_script(SCRIPT, *odd, *arguments, every_steps=3, warmup_steps=2, **chosen)


def line_of(text: str) -> str:
    """Return the line of the script that holds ``text``, as errors name it."""
    rows = SCRIPT.read_text().splitlines()
    return f"{SCRIPT.name}:{next(n for n, row in enumerate(rows, 1) if text in row)}"


def fenced(run: Run, chosen: Settings, raises: int, num_workers: int) -> Outcome:
    """Return how one rank left; the others, which wait for it, are fenced then."""
    members = run.begin(chosen, num_workers=num_workers)
    outcome = members[raises].left().outcome
    for rank, member in enumerate(members):
        if rank != raises:
            member.fence(len(run.lineage))
            member.left()
    return outcome


def test_what_one_rank_calls_alone_raises_there_and_names_where_the_others_are(run: Run) -> None:
    """Without this the next step waits for ever, and no message names a rank."""
    outcome = fenced(run, script("4:save:1"), raises=1, num_workers=3)

    assert isinstance(outcome, Raised)
    assert "session.save('best') is called by some workers only" in outcome.error
    where = line_of("session.train_step(loss_of)")
    assert f"ranks 0, 2 are in all_to_all ({where})" in outcome.error
    assert outcome.step == 5


@pytest.mark.parametrize("begin_with", [None, small_units], ids=["one unit", "units"])
@pytest.mark.parametrize("told", [("3:freeze:1",), ("1:freeze", "3:thaw:1")], ids=str)
def test_a_layer_that_one_rank_freezes_or_unfreezes_is_named_before_weights_change(
    run: Run, told: tuple[str, ...], begin_with: Callable[[], None] | None
) -> None:
    """Ranks reduced gradients of other sizes: the transport ended their processes, each time."""
    run.begin_with = begin_with
    for left in run.train(script(*told), num_workers=2):
        assert isinstance(left.outcome, Raised)
        assert left.outcome.step == 4
        assert "layers.0.bias trains on some workers only in step 4" in left.outcome.error
    on_all = [one.removesuffix(":1") for one in told]
    for left in run.train(script(*on_all), num_workers=2):
        assert isinstance(left.outcome, Completed)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("state_dict", "part [1, 2] of a weight [5, 2]"),
        ("layer", "part [1, 2] of a weight [5, 2]"),
        ("parameters", "part [1, 2] of a weight [5, 2]"),
        ("copies", "part [1, 2] of a weight [5, 2]"),
        ("optimizer", "part of an optimizer's state"),
    ],
)
def test_parts_are_not_pickled_though_all_ranks_called_for_them(
    run: Run, what: str, named: str
) -> None:
    """``state = model.state_dict()`` on all, and ``torch.save`` on rank 0: the same file."""
    lefts = run.train(script(f"3:{what}", steps=3), num_workers=4)

    outcome = lefts[2].outcome
    assert isinstance(outcome, Raised)
    line = line_of("torch.save(PICKLED")
    assert f"{line} pickles this worker's {named}" in outcome.error
    assert 'session.save("best")' in outcome.error


@pytest.mark.parametrize("what", ["layer", "optimizer"])
def test_a_part_of_the_state_that_one_rank_asks_for_raises_there(run: Run, what: str) -> None:
    """A layer that is no unit of FSDP has a part of its weights, too."""
    outcome = fenced(run, script(f"3:{what}:1"), raises=1, num_workers=2)

    assert isinstance(outcome, Raised)
    line = line_of(f'"{what}": lambda')
    assert f".state_dict() was called at {line} by some workers only" in outcome.error


def test_a_number_of_a_part_is_not_taken_for_one_of_the_whole(run: Run) -> None:
    """``float(weight.norm())`` was the norm of this worker's rows."""
    lefts = run.train(script("3:number"), num_workers=2)

    for left in lefts:
        assert isinstance(left.outcome, Raised)
        assert ".full_tensor() on all workers" in left.outcome.error


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("ddp", "DistributedDataParallel"),
        ("fsdp", "FullyShardedDataParallel"),
    ],
)
def test_a_second_way_of_data_parallelism_around_the_model_is_named(
    run: Run, what: str, named: str
) -> None:
    """The errors of torch speak of meshes, or of nothing."""
    lefts = run.train(script(f"1:{what}"), num_workers=2)

    for left in lefts:
        assert isinstance(left.outcome, Raised)
        line = line_of("WRAPPERS[what](model)")
        assert f"{line} puts {named} around the model" in left.outcome.error


def test_a_script_that_knows_parts_may_use_them_on_all_ranks(run: Run) -> None:
    """However late one of them comes."""
    lefts = run.train(script("3:sleep:1", "3:whole"), num_workers=3)

    assert [left.outcome for left in lefts] == [Completed(attempt=1, step=8)] * 3


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp_shard=3),
        ParallelLayout(dp_replicate=2, dp_shard=2),
        ParallelLayout(dp_shard=2, pp=2),
    ],
    ids=str,
)
def test_the_file_of_whole_weights_is_the_version_of_its_step(
    run: Run, layout: ParallelLayout
) -> None:
    """Element by element, also where a rank has neither a layer nor its name."""
    chosen = script("2:save", "8:save", odd=())
    run.train(chosen, num_workers=layout.world_size, layout=layout)

    saved = load_file(run.directory / "saved/best/model.safetensors")
    step, _ = newest(run)
    version = open_any(f"{run.directory}/checkpoints/step-{step:08d}")
    expected = {key.fqn: entry.shape for key, entry in version.state_map.entries.items()
                if key.slot == "weight"}  # fmt: skip
    assert {name: tuple(one.shape) for name, one in saved.items()} == expected
    digest = result(run)["weights_digest"]
    found = hashlib.sha256()
    for name in sorted(saved):
        if not name.endswith("scale"):
            found.update(name.encode())
            found.update(saved[name].numpy().tobytes())
    assert found.hexdigest() == digest
    assert all(torch.isfinite(one).all() for one in saved.values())


def test_every_rank_reports_storage_that_takes_no_file(run: Run) -> None:
    """Rank 0 alone writes; the others would wait for it in the next tensor."""
    (run.directory / "saved").write_text("in the way")
    lefts = run.train(script("3:save"), num_workers=3)

    for left in lefts:
        assert isinstance(left.outcome, Raised)
        assert left.outcome.error.startswith("StorageError: ")


@pytest.mark.parametrize(
    ("arguments", "steps", "why"),
    [
        (["4:stop"], 4, "enough"),
        (["4:stop:1"], 5, "enough"),
        (["4:sleep:0", "4:stop"], 4, "enough"),
        (["4:break"], 4, "the script left its loop after step 4"),
    ],
    ids=["all", "one", "one late", "break"],
)
def test_an_early_end_is_agreed_on_by_all_ranks(
    run: Run, arguments: list[str], steps: int, why: str
) -> None:
    """All that ask in one body end behind it. If one asks alone, the next step is the last."""
    lefts = run.train(script(*arguments), num_workers=3)

    assert [left.outcome for left in lefts] == [Completed(attempt=1, step=steps, ended=why)] * 3
    assert [line["step"] for line in lines(run)] == list(range(1, steps + 1))
    assert newest(run) == (steps, 1)
    # An attempt after a death at the very end has nothing to do.
    lefts = run.train(script(*arguments), num_workers=2, resume=(steps, 1))
    assert [left.outcome for left in lefts] == [Completed(attempt=2, step=steps, ended=why)] * 2
    assert len(lines(run)) == steps
    assert json.loads((run.directory / "stopped.json").read_text())["attempt"] == 1


def test_a_loop_that_only_one_rank_leaves_is_an_error_that_names_both_lines(run: Run) -> None:
    """The others would wait in the next step for ever."""
    outcome = fenced(run, script("4:break:2"), raises=2, num_workers=3)

    assert isinstance(outcome, Raised)
    assert "left the loop over session.steps after step 4 on rank 2" in outcome.error
    assert f"ranks 0, 1 are in all_to_all ({line_of('session.train_step')})" in outcome.error
    assert "session.stop" in outcome.error
