"""Optimizers' values outside the state of parameters come back, or are refused before step 1."""

import json
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from everstep import Session, Settings, run
from workers.errors import TaskError
from workers.settings import TrainSettings


class Own(torch.optim.Optimizer):
    """SGD whose rate depends on what a kind keeps; ``factor`` is called once a step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.begin()

    def begin(self) -> None:
        """Set attributes."""

    def factor(self) -> float:
        """Return a number of what is kept, and change that."""
        return 1.0

    def weight(self, one: Tensor) -> Tensor:
        """Return what the gradient is subtracted from."""
        return one

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        factor = self.factor()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    held = self.weight(one)
                    held.sub_(one.grad, alpha=float(group["lr"]) * factor)
                    one.copy_(held)

    @property
    def every(self) -> list[Tensor]:
        return [one for group in self.param_groups for one in group["params"]]


class InState(Own):
    """Under a key that is no parameter, made in the first step."""

    def factor(self) -> float:
        state: Any = self.state
        held = state.setdefault("global", {"count": 0, "mean": torch.tensor(1.0)})
        held["count"] += 1
        held["mean"].mul_(0.5)
        return float(held["count"] + held["mean"])


class InDictionary(Own):
    def begin(self) -> None:
        self.held: Any = {"count": 0, "nested": {"last": [1.0, 2.0]}}

    def factor(self) -> float:
        self.held["count"] += 1
        self.held["nested"]["last"].append(self.held["nested"]["last"].pop(0) / 2)
        return float(self.held["count"] + sum(self.held["nested"]["last"]))


class InOthers(Own):
    """Its values are of classes that come back as they were."""

    def begin(self) -> None:
        self.last = deque([1.0, 2.0, 3.0], maxlen=3)
        self.counts: Any = Counter(steps=1)
        self.seen: Any = defaultdict(int)

    def factor(self) -> float:
        self.last.append(self.last[0] / 2)
        self.counts.update(["steps"])
        self.seen["steps"] += 1
        return float(sum(self.last) + self.counts["steps"] + self.seen["steps"])


class InFirstStep(Own):
    """Not there when the optimizer is made, and then beside a table that never changes."""

    def begin(self) -> None:
        self.held: Any = {"table": torch.tensor([0.5, 0.25]), "count": 0}

    def factor(self) -> float:
        if not hasattr(self, "late"):
            self.late = {"sum": torch.tensor(0.0)}
        self.held["count"] += 1
        self.late["sum"] += self.held["table"][self.held["count"] % 2] * self.held["count"]
        return 1 + float(self.late["sum"])


class InTensor(Own):
    def begin(self) -> None:
        self.scale = torch.tensor(1.0)

    def factor(self) -> float:
        return float(self.scale.mul_(0.75))


class MasterInState(Own):
    """Where a master belongs, made of the weights before they train."""

    def begin(self) -> None:
        for one in self.every:
            self.state[one]["master"] = one.detach().clone().double().float()

    def weight(self, one: Tensor) -> Tensor:
        held: Tensor = self.state[one]["master"]
        # Until a version is loaded the weights are fresh memory, which may hold NaN.
        assert torch.allclose(held, one, rtol=0, atol=0, equal_nan=True)
        return held


class Masters(Own):
    def begin(self) -> None:
        self.masters: Any = [one.detach().clone() for one in self.every]

    def weight(self, one: Tensor) -> Tensor:
        held: Tensor = self.masters[[id(each) for each in self.every].index(id(one))]
        return held


class MastersAsParameters(Masters):
    def begin(self) -> None:
        self.masters = [nn.Parameter(one.detach().clone()) for one in self.every]


class MastersInFirstStep(Masters):
    masters = None

    def begin(self) -> None:
        pass

    def weight(self, one: Tensor) -> Tensor:
        self.masters = self.masters or [each.detach().clone() for each in self.every]
        return super().weight(one)


class MastersByParameter(Own):
    def begin(self) -> None:
        self.masters: Any = {one: {"fp32": one.detach().clone()} for one in self.every}

    def weight(self, one: Tensor) -> Tensor:
        held: Tensor = self.masters[one]["fp32"]
        return held


class OnParameter(Own):
    def weight(self, one: Any) -> Tensor:
        if not hasattr(one, "master"):
            one.master = one.detach().clone()
        held: Tensor = one.master
        return held


class OnParameterAtFirst(OnParameter):
    def begin(self) -> None:
        for one in self.every:
            self.weight(one)


class SlowWeights(Own):
    """As Lookahead keeps them: the first step leaves them as they were."""

    def begin(self) -> None:
        self.slow, self.count = [one.detach().clone() for one in self.every], 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.count += 1
        for one, slow in zip(self.every, self.slow, strict=True):
            if self.count % 3 == 0:
                one.copy_(slow.lerp_(one, 0.5))


class InClosure(Own):
    def begin(self) -> None:
        masters = {one: one.detach().clone() for one in self.every}
        self.master_of = lambda one: masters[one]

    def weight(self, one: Tensor) -> Tensor:
        return self.master_of(one)


class InDefaults(Own):
    def begin(self) -> None:
        self.defaults["slow"] = [one.detach().clone() for one in self.every]


class BufferInState(Own):
    def factor(self) -> float:
        state: Any = self.state
        held = state["global"].setdefault("buffer", torch.ones(3))
        return float(held.mul_(0.5).sum())


class BufferInGroup(Own):
    def factor(self) -> float:
        held = self.param_groups[0].setdefault("buffer", torch.ones(3))
        return float(held.mul_(0.5).sum())


class InArray(Own):
    def begin(self) -> None:
        self.held = np.ones(2)

    def factor(self) -> float:
        self.held *= 0.5
        return float(self.held.sum())


class Statistics:
    count = 0


class InObject(Own):
    def begin(self) -> None:
        self.statistics = Statistics()

    def factor(self) -> float:
        self.statistics.count += 1
        return self.statistics.count


class InInner(Own):
    """As Lookahead has one."""

    def begin(self) -> None:
        self.inner = torch.optim.SGD(self.every, lr=0.1, momentum=0.9)

    def factor(self) -> float:
        self.inner.step()
        return 1.0


class InGenerator(Own):
    def begin(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def factor(self) -> float:
        return float(torch.rand((), generator=self.generator))


class Harmless(Own):
    """Keeps much, of which nothing is state."""

    def begin(self) -> None:
        self.parameters = self.every
        self.flat = [one.data.view(-1) for one in self.every]
        self.table = torch.arange(4.0)
        self.model = nn.Linear(2, 2)
        self.name_of = lambda one: str(one.shape)

    def factor(self) -> float:
        self.gradients = [one.grad for one in self.every]
        return float(self.table[1])


def train(
    directory: Path, kind: type[Own], steps: int, init_from: str = "", *, deterministic: bool = True
) -> dict[str, Any]:
    """Train a small model; goes on where the run in ``directory`` was. Return its result."""

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(4, 3))
        session.optimizer(lambda named: kind(named.values()), elementwise=True)
        for _ in session.steps(16):
            session.train_step(
                lambda samples: model(torch.eye(4)[samples % 4]).sub(1.0).square().mean()
            )

    small = TrainSettings(
        steps=steps, global_batch=4, micro_batch=2, warmup_steps=0, lr=0.05, schedule="constant",
        deterministic=deterministic,
    )  # fmt: skip
    run(task, directory=str(directory), settings=Settings(train=small), init_from=init_from)
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


SAVED = [InState, InDictionary, InOthers, InFirstStep, InTensor, MasterInState, Harmless]
REFUSED = {
    Masters: r"a tensor of shape \(64,\) in masters\[0\]|a tensor of shape \(16, 4\) in masters",
    MastersAsParameters: "a tensor of shape .* in masters",
    MastersInFirstStep: "a tensor of shape .* in masters",
    MastersByParameter: "a tensor of shape .* in masters",
    OnParameter: "a tensor of shape .* in parameter.master",
    OnParameterAtFirst: "a tensor of shape .* in parameter.master",
    SlowWeights: r"a tensor of shape .* in slow\[0\]",
    InClosure: "a tensor of shape .* in master_of: masters",
    InDefaults: r"a tensor of shape .* in defaults.slow\[0\]",
    BufferInState: r"a tensor of shape \(3,\) in state.global\['buffer'\]",
    BufferInGroup: r"a tensor of shape \(3,\) in param_groups\[0\].buffer",
    InArray: "a ndarray in held",
    InObject: "a value in statistics.count",
    InInner: "a tensor of shape .* in inner.state",
    InGenerator: "random numbers of its own in generator",
}


@pytest.mark.parametrize("kind", SAVED)
def test_what_is_kept_elsewhere_comes_back(kind: type[Own], tmp_path: Path) -> None:
    """Twice: a second resume saves what the first one has loaded."""
    whole = train(tmp_path / "whole", kind, 6)
    for steps in (2, 3, 6):
        parts = train(tmp_path / "parts", kind, steps)

    assert parts["weights_digest"] == whole["weights_digest"]
    assert parts["final_loss"] == whole["final_loss"]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_come_back_is_refused_by_name_before_step_1(
    kind: type[Own], tmp_path: Path
) -> None:
    """Weights would not be numbers, or training would restart half, without a word."""
    told = rf"step 1\n[\s\S]*StateError: optimizer {kind.__name__} keeps ({REFUSED[kind]}).*self"
    with pytest.raises(TaskError, match=told):
        train(tmp_path, kind, 2)

    assert not (tmp_path / "metrics").exists()


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_optimizer_sees_the_first_weights_when_it_is_made(
    deterministic: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """They were filled afterwards. Those of a checkpoint that a run starts from count, too."""
    train(tmp_path / "plain", Own, 2, deterministic=deterministic)
    source = str(tmp_path / "plain/checkpoints/step-00000002")
    found = [
        train(tmp_path / f"{kind.__name__}{bool(path)}", kind, 2, path, deterministic=deterministic)
        for kind in (Own, MasterInState)
        for path in ("", source)
    ]

    digests = [one["weights_digest"] for one in found]
    assert digests[0] == digests[2] != digests[1] == digests[3]
