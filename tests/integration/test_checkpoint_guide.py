"""The guide's page of ``everstep.checkpoint``: each of its changes is made, and the result runs."""

import re
from collections import OrderedDict
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from everstep import checkpoint
from tests.arch.tree import ROOT
from tests.support.forking import run_script

PORTS = ROOT / "tests/support/ports"
PAGE = (ROOT / "workers/guide/checkpoints.md").read_text(encoding="utf-8")
NUM_NEW_MAX = 9


def block(heading: str) -> str:
    """Return the block below a heading."""
    found = re.search(rf"\n## {heading}\n.*?```(?:diff|py)\n(.*?)```", PAGE, re.DOTALL)
    assert found, heading
    return found[1]


def changed(text: str, diff: str) -> str:
    """Return a text with the changes of a diff, each of which fits one place."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize("heading", ["A loop with FSDP2", "torchtitan"])
def test_few_lines_are_new(heading: str) -> None:
    """The promise of the page: a script stays as it is."""
    assert sum(line.startswith("+") for line in block(heading).splitlines()) <= NUM_NEW_MAX


def test_a_loop_with_fsdp_continues_where_it_was(tmp_path: Path) -> None:
    """Its first life ends at step 20; the second one prints no step before."""
    text = changed((PORTS / "titan_plain.py").read_text(), block("A loop with FSDP2"))
    script = tmp_path / "train.py"
    printed = []
    for last in (20, 30):
        script.write_text(text.replace("self.step < self.job.steps", f"self.step < {last}"))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rank = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        printed += re.findall(
            r"step (\d+): loss (\d\.\d+)", run_script(script, tmp_path, environment=rank)
        )

    assert [int(step) for step, _ in printed] == [10, 20, 30]
    losses = [float(loss) for _, loss in printed]
    assert losses == sorted(losses, reverse=True)
    assert checkpoint.newest(tmp_path / "outputs") == str(tmp_path / "outputs/step-00000020")


class Optimizers:
    """As torchtitan's ``OptimizersContainer``: one for each part of the model."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in parts]

    def __iter__(self) -> Any:
        return iter(self.optimizers)


class Counted:
    """As its trainer, loader and schedulers: an object with a state."""

    def __init__(self) -> None:
        self.count = self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "step": self.step, "rank 0": b"pickled"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank 0"] == b"pickled"
        self.count, self.step = state["count"], state["step"]


class Titan(Counted):
    """The attributes that torchtitan's ``Trainer`` has when it loads and saves (0.2)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model_parts: list[nn.Module] = [
            nn.Sequential(OrderedDict(first=nn.Linear(3, 3))),
            nn.Sequential(OrderedDict(last=nn.Linear(3, 2))),
        ]
        self.optimizers = Optimizers(self.model_parts)
        self.lr_schedulers, self.dataloader = Counted(), Counted()


def test_torchtitan_continues_where_it_was(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its documented interface: the package needs a nightly torch and GPUs."""
    monkeypatch.chdir(tmp_path)
    new = [line[1:] for line in block("torchtitan").splitlines() if line.startswith("+")]
    load = dedent("\n".join(new[:4]))
    save = dedent("\n".join(new[4:]))

    def life(last: int) -> Titan:
        self = Titan()
        names = {"self": self, "checkpoint": checkpoint}
        exec(load, names)  # noqa: S102  as a reader pastes it
        while self.step < last:
            self.step += 500
            self.count += 1
            hidden = torch.ones(3)
            for part in self.model_parts:
                hidden = part(hidden)
            hidden.sum().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            exec(save, names)  # noqa: S102
        checkpoint.wait()
        return self

    through = life(2000)
    monkeypatch.chdir(tmp_path_factory.mktemp("again"))
    life(1000)
    again = life(2000)
    assert checkpoint.newest("ckpt") == "ckpt/step-00002000"
    assert (again.count, again.step) == (4, 2000)
    for one, other in zip(through.model_parts, again.model_parts, strict=True):
        for name, weight in one.state_dict().items():
            assert torch.equal(weight, other.state_dict()[name]), name
