"""Optimizers that go wrong on parts are refused before the first step; others are let be."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep import Session, Settings, run
from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout
from workers.errors import StateError, TaskError
from workers.parallel import LocalShard
from workers.settings import TrainSettings
from workers.state import local_parameters, refuse_unfit
from workers.state.entries import state_of

ALONE = ParallelLayout()
COPIES = ParallelLayout(dp_replicate=2)
SHARDS = ParallelLayout(dp_shard=2)
MIXED = ParallelLayout(dp_replicate=2, dp_shard=2)
SEQUENCES = ParallelLayout(cp=2)

WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))


class OwnMuon(torch.optim.Muon):
    """As a user derives one to change a detail."""


class Lion(torch.optim.SGD):
    """As a user derives one whose update is its own, here of each element alone."""


class Counting(torch.optim.SGD):
    """Its updates depend on what it counts in its group, as ScheduleFree's, and in itself."""

    num_steps = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0].update(count=0, ratio=torch.tensor(1.0), pair=(0, 0.5))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        (group,) = self.param_groups
        group["count"] += 1
        group["ratio"].mul_(0.5)
        group["pair"] = (group["count"], 0.5)
        counted = [group["count"], float(group["ratio"]), *group["pair"], self.num_steps]
        group["weight_decay"] = sum(counted) / 100
        super().step(closure)


def over(
    kind: type[Any], weight: torch.Tensor = WEIGHT
) -> tuple[LocalShard, dict[str, nn.Parameter], Any]:
    """Return a model of one matrix, and ``kind`` over it after one step."""
    local = weight.clone()
    box = Box((0, 0), tuple(local.shape))
    parameter = nn.Parameter(local)
    shard = LocalShard(
        fqn="w",
        shape=tuple(local.shape),
        boxes=(box,),
        replicas=(0,),
        parameter=parameter,
        local=parameter.data,
    )
    own = local_parameters([shard])
    optimizer = kind(own.values(), lr=0.1)
    for one in own.values():
        one.grad = weight.cos()
    optimizer.step(lambda: 1.0)
    return shard, own, optimizer


@pytest.mark.parametrize("layout", [ALONE, COPIES, SHARDS], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_what_cannot_be_used_here_at_all_is_refused_by_name(
    kind: type[Any], layout: ParallelLayout
) -> None:
    """One would fail in the second step, the others in the first, with words of torch."""
    optimizer = kind([nn.Parameter(WEIGHT.clone())])

    with pytest.raises(StateError, match=rf"optimizer {kind.__name__} .*use one that") as refused:
        refuse_unfit(optimizer, layout)
    assert refused.value.facts == {"optimizer": kind.__name__, "layout": str(layout)}


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_what_these_keep_could_not_be_saved_even_alone(kind: type[Any]) -> None:
    """Otherwise there were no reason to refuse them where nothing is in parts."""
    shard, parameters, optimizer = over(kind)

    with pytest.raises(StateError, match="cannot be resumed"):
        state_of([shard], parameters, optimizer)


@pytest.mark.parametrize("layout", [SHARDS, MIXED, SEQUENCES], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Muon, OwnMuon])
def test_muon_is_refused_where_matrices_are_in_parts(
    kind: type[Any], layout: ParallelLayout
) -> None:
    """Its momentum has the shape of the weight, so nothing else would ever complain."""
    shard, parameters, optimizer = over(kind)
    assert {entry.slot for entry in state_of([shard], parameters, optimizer)} > {"weight"}

    with pytest.raises(StateError, match=rf"{kind.__name__} .*(dp_shard|cp)=2.*dp_replicate"):
        refuse_unfit(optimizer, layout)


@pytest.mark.parametrize("layout", [ALONE, COPIES], ids=str)
def test_muon_is_let_be_where_every_worker_has_whole_matrices(layout: ParallelLayout) -> None:
    """There it is as right as in a plain script."""
    _, _, optimizer = over(torch.optim.Muon)

    refuse_unfit(optimizer, layout)


@pytest.mark.parametrize(
    "name",
    [
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ],
)
def test_an_elementwise_optimizer_is_accepted(name: str) -> None:
    """For these, and not for Muon, two halves of a matrix move as the whole does."""
    kind = getattr(torch.optim, name)
    whole, halves = (
        [over(kind, part)[0].local for part in parts]
        for parts in ([WEIGHT], [WEIGHT[:3], WEIGHT[3:]])
    )
    refuse_unfit(over(kind)[2], SHARDS)

    torch.testing.assert_close(torch.cat(halves), whole[0])


@pytest.mark.parametrize("layout", [SHARDS, MIXED, SEQUENCES], ids=str)
def test_an_unknown_class_is_refused_on_parts_unless_declared(
    layout: ParallelLayout,
) -> None:
    """LAMB, SOAP and Shampoo have state of any shape, and the curve depends on the workers."""
    _, _, optimizer = over(Lion)

    with pytest.raises(StateError, match=r"Lion .*(dp_shard|cp)=2.*elementwise=True.*dp_replicate"):
        refuse_unfit(optimizer, layout)
    refuse_unfit(optimizer, layout, elementwise=True)
    refuse_unfit(optimizer, COPIES)


def test_what_is_known_not_to_fit_cannot_be_declared_away() -> None:
    """The declaration is for classes that are not known."""
    _, _, optimizer = over(OwnMuon)

    with pytest.raises(StateError, match="OwnMuon"):
        refuse_unfit(optimizer, SHARDS, elementwise=True)


def test_halves_of_a_matrix_do_not_move_as_the_whole_does_with_muon() -> None:
    """If they did, refusing it would be of no use."""
    whole, first = (over(torch.optim.Muon, part)[0].local for part in (WEIGHT, WEIGHT[:3]))

    assert (whole[:3] - first).abs().max() > 0.001


def train(
    directory: Path, kind: Callable[..., Any], steps: int, *, over_model: bool = False
) -> None:
    """Train a matrix alone; goes on where the run in ``directory`` was."""

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(4, 4, bias=False))

        def make(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
            given = model.parameters() if over_model else parameters.values()
            optimizer: torch.optim.Optimizer = kind(given)
            return optimizer

        session.optimizer(make)
        for step in session.steps(16):
            for samples in step.micro_batches():
                inputs = torch.eye(4)[samples % 4]
                step.backward((model(inputs) - inputs).square().mean(), tokens=len(samples))
            step.apply()

    small = TrainSettings(
        steps=steps,
        global_batch=4,
        micro_batch=2,
        warmup_steps=0,
        lr=0.01,
        schedule="constant",
        deterministic=True,
    )
    run(task, directory=str(directory), settings=Settings(train=small))


def test_a_script_is_refused_before_it_trains(tmp_path: Path) -> None:
    """A run that ends in its second step has taken the machines by then."""
    with pytest.raises(TaskError, match=r"step 1\n[\s\S]*StateError: optimizer Adafactor"):
        train(tmp_path, torch.optim.Adafactor, steps=2)

    assert not (tmp_path / "metrics").exists()


class Packed(torch.optim.SGD):
    """Keeps a number for each block of its shard, as 8-bit optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("scales", torch.zeros(parameter.numel() // 8))
        super().step(closure)


class Codes(torch.Tensor):
    """A tensor whose memory is something else than its values."""


class Quantized(torch.optim.SGD):
    """Keeps tensors of a class of its own, as those of torchao."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("codes", torch.zeros_like(parameter).as_subclass(Codes))
        super().step(closure)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Packed, "scales of weight is neither a number nor a tensor of shape"),
        (Quantized, "codes of weight is of the class Codes"),
    ],
)
def test_state_that_cannot_be_resharded_is_refused_before_the_first_step(
    kind: type[Any], told: str, tmp_path: Path
) -> None:
    """Such state is made in the first update, after which it was too late."""
    with pytest.raises(TaskError, match=rf"step 1\n[\s\S]*StateError: the optimizer's {told}"):
        train(tmp_path, kind, steps=2)

    assert not (tmp_path / "metrics").exists()


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_optimizers_of_torchao_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """They quantize blocks of a shard, and only of one with 4096 elements: it depends on ranks."""
    low_bit = pytest.importorskip("torchao.optim", reason="torchao is not installed")

    def task(session: Session) -> None:
        session.model(lambda: nn.Linear(64, 128))
        session.optimizer(lambda named: getattr(low_bit, name)(named.values()))

    with pytest.raises(TaskError, match=r"exp_avg of weight is of the class OptimState.*torchao"):
        run(task, directory=str(tmp_path))


def test_an_optimizer_of_another_library_begins_its_first_step_as_it_was_made(
    tmp_path: Path,
) -> None:
    """Trying what it keeps must not count as a step."""
    counts: list[tuple[int, int]] = []

    class Counting(torch.optim.SGD):
        num_steps = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            (group,) = self.param_groups
            counts.append((group.setdefault("count", 0), self.num_steps))
            group["count"] += 1
            self.num_steps += 1
            super().step(closure)

    train(tmp_path, functools.partial(Counting, momentum=0.9), steps=3)

    assert counts == [(0, 0), (0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Muon,
        functools.partial(torch.optim.AdamW, lr=torch.tensor(0.5)),
        functools.partial(torch.optim.AdamW, fused=True),
        functools.partial(torch.optim.AdamW, foreach=True, amsgrad=True),
        functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True),
        torch.optim.Adagrad,
        Counting,
    ],
    ids=["muon", "tensor as rate", "fused", "foreach", "fused sgd", "adagrad", "counting"],
)
def test_an_optimizer_resumes_to_the_bit(kind: Callable[..., Any], tmp_path: Path) -> None:
    """It is let be only if all that it keeps is saved and loaded, however it computes."""
    train(tmp_path / "resumed", kind, steps=2)
    train(tmp_path / "resumed", kind, steps=4)
    train(tmp_path / "whole", kind, steps=4)

    resumed, whole = (
        json.loads((tmp_path / run / "result.json").read_text()) for run in ("resumed", "whole")
    )
    assert resumed["final_loss"] == whole["final_loss"]
    assert resumed["weights_digest"] == whole["weights_digest"]


def test_values_that_a_script_changes_come_back_and_those_it_is_made_with_do_not(
    tmp_path: Path,
) -> None:
    seen: list[tuple[float, float]] = []

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        momentum = 0.25 * (1 + session.step)
        optimizer = session.optimizer(lambda named: torch.optim.SGD(named.values(), 1, momentum))
        (group,) = optimizer.param_groups
        for step in session.steps(4):
            seen.append((group["momentum"], group["weight_decay"]))
            if step.number == 1:
                group["weight_decay"] = 0.125
            session.train_step(lambda _: model(torch.ones(1, 2)).sum())

    for steps in (2, 3):
        run(task, directory=str(tmp_path), steps=steps, global_batch=1, micro_batch=1)

    assert seen == [(0.25, 0.0), (0.25, 0.125), (0.75, 0.125)]


def test_an_optimizer_over_the_models_own_parameters_is_as_good(tmp_path: Path) -> None:
    """That is how every other script makes one; the first save ended with a bare KeyError."""
    train(tmp_path / "model", torch.optim.AdamW, steps=2, over_model=True)
    train(tmp_path / "model", torch.optim.AdamW, steps=4, over_model=True)
    train(tmp_path / "given", torch.optim.AdamW, steps=4)

    model, given = (
        json.loads((tmp_path / run / "result.json").read_text()) for run in ("model", "given")
    )
    assert model["weights_digest"] == given["weights_digest"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (lambda _: torch.optim.SGD([nn.Parameter(WEIGHT)]), "does not belong to this session"),
        # Its state is keyed by the model's parameters from the start.
        (torch.optim.Adagrad, "keeps state for"),
    ],
)
def test_an_optimizer_over_other_parameters_is_refused_with_what_to_do(
    kind: Callable[..., Any], why: str, tmp_path: Path
) -> None:
    """It would train something else."""
    with pytest.raises(TaskError, match=rf"StateError: optimizer .*{why}.*parameters.values"):
        train(tmp_path, kind, steps=1, over_model=True)
