"""A session under torchrun, as a reader of README runs it: what it keeps without Ray."""

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from everstep import ParallelSettings, SettingsError
from tests.arch.tree import ROOT
from tests.support.attempts import curve
from tests.support.forking import begin_ranks, run_script
from ucp_core.layout import ParallelLayout
from workers.train.launched import layout_for

SCRIPT = ROOT / "tests/support/train_launched.py"
SECONDS_MAX = 240.0
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def launched(directory: Path, num_ranks: int, *arguments: str) -> subprocess.Popen[str]:
    with (directory / "printed").open("a") as printed:
        return subprocess.Popen(
            [*LAUNCHER, "--nproc-per-node", str(num_ranks), str(SCRIPT), *arguments],
            cwd=directory,
            stdout=printed,
            stderr=subprocess.STDOUT,
            text=True,
        )


def begun_and_killed(directory: Path, num_ranks: int, step: int) -> None:
    """Train until a step is saved, and end all ranks at once, as a machine does that loses power.

    The next step that is saved would be three steps later; ranks wait before it.

    Nothing that they do depends on a launcher, so they are forked.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = begin_ranks(SCRIPT, directory, num_ranks, store.port, str(step + 2))
    deadline_s = time.monotonic() + SECONDS_MAX
    try:
        while not (directory / f"run/checkpoints/step-{step:08d}/manifest.json").exists():
            is_at_work = all(one.is_alive() for one in ranks) and time.monotonic() < deadline_s
            assert is_at_work, (directory / "0").read_text()
            time.sleep(0.05)
    finally:
        for one in ranks:
            one.kill()
            one.join()


def records(directory: Path) -> list[dict[str, Any]]:
    """Return the micro-batches that any rank has computed."""
    files = sorted(directory.glob("samples-*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def samples(noted: Iterable[dict[str, Any]]) -> dict[int, set[int]]:
    """Return the samples that any rank has computed in a step, also to compare workers."""
    found: dict[int, set[int]] = {}
    for one in noted:
        found.setdefault(one["step"], set()).update(one["samples"])
    return found


def ranges(directory: Path) -> dict[int, tuple[int, int]]:
    """Return the part of the order of samples that each step has taken in the end."""
    lines = (directory / "run/metrics/rank0.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {one["step"]: (one["order_start"], one["order_stop"]) for one in found}


def damage_newest(directory: Path) -> int:
    """Change a byte of one rank's part of the newest version; return its step."""
    newest = max(directory.glob("run/checkpoints/step-*/manifest.json")).parent
    part = max(newest.glob("*.bin"))
    content = bytearray(part.read_bytes())
    content[5] ^= 1
    part.write_bytes(content)
    return int(newest.name.removeprefix("step-"))


def test_a_job_that_is_killed_goes_on_under_torchrun_with_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    """Without a controller each rank might choose a version of its own, or write to another's.

    The newest version is damaged meanwhile, which only the rank that reads its bytes can notice:
    all of them have to go on from the one before.
    """
    alone, together = tmp_path / "alone", tmp_path / "together"
    for directory in (alone, together):
        directory.mkdir()
    run_script(SCRIPT, alone)

    begun_and_killed(together, 4, 18)
    bad = damage_newest(together)
    again = launched(together, 2)
    assert again.wait(SECONDS_MAX) == 0, (together / "printed").read_text()

    printed = (together / "printed").read_text()
    assert f"skipped the damaged checkpoint step-{bad:08d}" in printed
    assert printed.splitlines().count("behind run") == 1
    expected, found = (json.loads((d / "run/result.json").read_text()) for d in (alone, together))
    assert found["weights_digest"] == expected["weights_digest"]
    assert curve(together / "run") == curve(alone / "run")
    noted = records(together)
    resumed = min(one["step"] for one in noted if one["world"] == 2) - 1
    assert 0 < resumed < bad
    counted = samples(one for one in noted if (one["world"] == 2) == (one["step"] > resumed))
    assert counted == samples(records(alone))
    assert ranges(together) == {step: (32 * step - 32, 32 * step) for step in range(1, 41)}
    assert {one["world"] for one in noted} == {4, 2}
    assert not any(one["ray"] for one in noted)


def test_an_error_on_one_rank_ends_the_job_and_names_it(tmp_path: Path) -> None:
    """The others wait in a collective: they must not hold the launcher for its timeout."""
    job = launched(tmp_path, 2, "0", "raise")
    assert job.wait(SECONDS_MAX) != 0

    printed = (tmp_path / "printed").read_text()
    assert "training failed in step 3" in printed
    assert "ValueError: rank 1 of the script" in printed


def test_a_rank_that_computes_otherwise_is_named_before_the_first_step(tmp_path: Path) -> None:
    """Each step would be right on its own, and its bits depend on where a worker is."""
    job = launched(tmp_path, 2, "0", "odd")
    assert job.wait(SECONDS_MAX) != 0

    printed = (tmp_path / "printed").read_text()
    assert "KernelsDifferError: the workers do not compute alike: attention" in printed
    assert "(DEFAULT, torch" in printed
    assert not (tmp_path / "run/metrics/rank0.jsonl").exists()


def test_degrees_follow_the_settings_and_one_that_does_not_divide_is_refused() -> None:
    """A layout that leaves ranks idle would hold them for ever; a controller would divide it."""
    degrees = ParallelSettings(tp=2, dp_replicate=2, ep=2)

    assert layout_for(1, degrees) == ParallelLayout()
    assert layout_for(8, degrees) == ParallelLayout(dp_replicate=2, dp_shard=2, tp=2, ep=2)
    assert layout_for(12, degrees) == ParallelLayout(dp_replicate=2, dp_shard=3, tp=2)
    with pytest.raises(SettingsError, match=r"dp_replicate=2 x tp=2 needs a multiple of 4 .* 6;"):
        layout_for(6, degrees)
