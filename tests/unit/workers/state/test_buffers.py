"""State in buffers is saved, if it does not depend on the workers; else it is refused."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ucp_core
from everstep import ModelPlan, Session, Settings, run
from tests.support.made import assignment_of
from tests.support.ranks import Place, running
from ucp_core.layout import ParallelLayout
from ucp_core.storage import LocalStore
from workers.errors import TaskError
from workers.protocol import Completed, Outcome, Raised
from workers.settings import TrainSettings
from workers.state import PersistentBuffers
from workers.telemetry import ProgressRecord
from workers.train import WorkerContext, run_attempt

TABLE = torch.arange(4.0).outer(torch.ones(4))


def inputs_of(samples: Any) -> Tensor:
    return (torch.from_numpy(samples).float()[:, None] / 16).expand(-1, 4).exp()


class Scaled(nn.Module):
    """Multiplies by a buffer and then does with it what it is told."""

    def __init__(self, use: Callable[[Any], object], *, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", TABLE.clone(), persistent=persistent)
        self.register_buffer("late", None, persistent=persistent)
        self.use = use

    def forward(self, inputs: Tensor) -> Tensor:
        table: Any = self.table
        output: Tensor = self.linear(inputs @ table)
        self.seen = output.detach()
        self.use(self)
        return output


def count(module: Any) -> None:
    module.table += 1


def fill_late(module: Any) -> None:
    module.late = torch.ones(1)


def replace(module: Any) -> None:
    module.table = module.table * 0.9


def point_elsewhere(module: Any) -> None:
    module.table.data = torch.zeros(4, 4)


def write_unseen(module: Any) -> None:
    module.table.data.mul_(0.9)


def register(module: Any) -> None:
    module.linear.register_buffer("mean", torch.zeros(4))


def mix(module: Any) -> None:
    module.table.mul_(0.9).add_(0.1 * module.seen.mean())


def write_in_evaluation(module: Any) -> None:
    if not module.training:
        with torch.inference_mode():
            module.table.zero_()


def look(module: Any) -> None:
    module.state_dict()
    module.to("cpu").float()
    module.table = module.table.detach()
    with torch.no_grad():
        module.train(not module.training)
        module.table[1:].sum().item()


def task(
    build: Callable[[], nn.Module],
    *,
    evaluates: bool = False,
    averages: Sequence[str] = (),
    look: Callable[[Any], object] = lambda _: None,
) -> Callable[[Session], None]:
    def train(session: Session) -> None:
        model = session.model(build, average_buffers=averages)
        session.optimizer(lambda parameters: torch.optim.SGD(parameters.values()))
        for _ in session.steps(16):
            session.train_step(lambda samples: model(inputs_of(samples)).square().mean())
            look(model)
            if evaluates:
                session.evaluate(lambda samples: (model(torch.ones(len(samples), 4)).mean(), 1), 4)

    return train


def train(directory: Path, task: Callable[[Session], None], **settings: Any) -> None:
    small = TrainSettings(
        **{
            "global_batch": 4,
            "micro_batch": 2,
            "warmup_steps": 0,
            "schedule": "constant",
            **settings,
        }
    )
    run(task, directory=str(directory), settings=Settings(train=small))


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (mix, r"buffer table of the model \(Scaled\) differs between micro-batches[\s\S]*average_"),
        (fill_late, "buffer late of the model .* another shape or dtype after step 1"),
        (register, r"buffer mean of module linear \(Linear\) is new in step 1"),
    ],
)
def test_what_would_depend_on_the_workers_is_refused_in_the_first_step(
    tmp_path: Path, use: Callable[[Any], None], told: str
) -> None:
    """Each worker would have its own value, and a snapshot the value of one."""
    with pytest.raises(TaskError, match=rf"in step 1\n[\s\S]*{told}[\s\S]*persistent=False"):
        train(tmp_path, task(lambda: Scaled(use)), steps=2)


def test_a_change_outside_of_training_is_seen_in_the_next_step(tmp_path: Path) -> None:
    """Only the evaluation touched it; the step before was as it should be."""
    script = task(lambda: Scaled(write_in_evaluation), evaluates=True)

    with pytest.raises(TaskError, match=r"in step 2\n[\s\S]*buffer table .* outside of a step"):
        train(tmp_path, script, steps=3)


def keep_stage(model: Any, stage: int, _num_stages: int) -> None:
    model[1 - stage] = nn.Identity()


def trained_in_stages(use: Callable[[Any], object], averages: list[str], place: Place) -> Outcome:
    """Return how an attempt of two pipeline stages ends on this rank."""

    def train(session: Session) -> None:
        model = session.model(
            lambda: nn.Sequential(Scaled(use), nn.Linear(4, 4)),
            plan=ModelPlan(keep_stage=keep_stage),
            average_buffers=averages,
        )
        session.optimizer(lambda parameters: torch.optim.SGD(parameters.values()))
        for _ in session.steps(16):
            session.train_step(lambda samples: model(inputs_of(samples)).square().mean())

    page = ProgressRecord.create(place.progress_path, worker=f"w{place.rank}")
    context = WorkerContext(
        worker=f"w{place.rank}",
        settings=Settings(train=TrainSettings(steps=1, global_batch=4, micro_batch=2)),
        store=LocalStore(),
        directory=str(place.directory / "run"),
        progress=page,
        ring_path=str(place.ring_path),
        yield_requested=lambda _attempt: False,
        fenced=lambda _attempt: False,
    )
    assignment = assignment_of(place.rank, layout=ParallelLayout(pp=2), store_port=place.port)
    outcome = run_attempt(assignment, context, train)
    page.close()
    return outcome


@pytest.mark.parametrize(
    ("use", "averages", "told"),
    [
        (count, [], r"buffer table of module 0 \(Scaled\) changed in a pipeline in step 1"),
        (mix, ["*.table"], r"average_buffers=\['\*.table'\] needs parallel.pp: 1"),
    ],
    ids=["counts", "averaged"],
)
def test_a_buffer_that_changes_in_a_pipeline_is_refused(
    tmp_path: Path, use: Callable[[Any], None], averages: list[str], told: str
) -> None:
    """Several passes are open at a time: none could begin with the value before the step."""
    with running(functools.partial(trained_in_stages, use, averages), 2, tmp_path) as ranks:
        first, second = ranks.results()

    assert isinstance(first, Raised), first
    assert re.search(told, first.error)
    assert "parallel.pp: 1" in first.error
    assert not isinstance(second, Completed)


def test_stages_may_have_constant_buffers(tmp_path: Path) -> None:
    """Otherwise the refusal would hit every model: a table of positions is one."""
    with running(functools.partial(trained_in_stages, id, []), 2, tmp_path) as ranks:
        assert [type(one) for one in ranks.results()] == [Completed, Completed]


def batch_normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def spectral_normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))


RUNNING = ("*.running_mean", "*.running_var")
STATEFUL: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "count": (lambda: Scaled(count), ()),
    "replace": (lambda: Scaled(replace), ()),
    "elsewhere": (lambda: Scaled(point_elsewhere), ()),
    "unseen": (lambda: Scaled(write_unseen), ()),
    "mean": (lambda: Scaled(mix), ("table",)),
    "spectral": (spectral_normed, ()),
    "batch": (batch_normed, RUNNING),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_buffers_go_on_where_they_were(tmp_path: Path, name: str) -> None:
    """As if the run had never stopped; whatever way a module writes them."""
    build, averages = STATEFUL[name]
    seen: list[dict[str, Tensor]] = []

    def look(model: Any) -> None:
        seen.append({fqn: buffer.clone() for fqn, buffer in model.named_buffers()})

    script = task(build, averages=averages, look=look)
    train(tmp_path / "whole", script, steps=4)
    whole, seen[:] = list(seen), []
    train(tmp_path / "run", script, steps=2)
    train(tmp_path / "run", script, steps=4)

    for once, again in zip(whole, seen, strict=True):
        assert once.keys() == again.keys() != set()
        assert all(torch.equal(once[fqn], again[fqn]) for fqn in once)
    if name != "elsewhere":
        assert any(not torch.equal(whole[0][fqn], whole[1][fqn]) for fqn in whole[0])
    held = ucp_core.open(tmp_path / "run/checkpoints/step-00000004").state_map.entries
    assert {(fqn, "weight") for fqn in whole[0]} <= {tuple(key) for key in held}


def test_a_step_changes_a_buffer_as_one_micro_batch_does(tmp_path: Path) -> None:
    """Else four workers, which compute a quarter of the micro-batches each, had other values."""
    seen: list[Tensor] = []

    def look(model: Any) -> None:
        seen.append(model.table.clone())

    for micro_batch in (1, 2, 4):
        script = task(lambda: Scaled(count), look=look)
        train(tmp_path / str(micro_batch), script, steps=1, micro_batch=micro_batch)

    assert all(torch.equal(table, TABLE + 1) for table in seen)


def test_running_statistics_are_the_mean_over_the_micro_batches(tmp_path: Path) -> None:
    """The last micro-batch alone would count, and another one with more workers."""
    norms: list[Any] = []
    inputs: list[Tensor] = []

    def build() -> nn.Sequential:
        model = batch_normed()
        model[1].register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
        return model

    script = task(build, averages=RUNNING, look=lambda model: norms.append(model[1]))
    train(tmp_path, script, steps=1)

    means = torch.stack([one.mean(0) for one in inputs])
    assert len(means) == 2
    torch.testing.assert_close(norms[0].running_mean, 0.1 * means.mean(0))
    assert norms[0].num_batches_tracked == 1


def test_running_statistics_are_refused_unless_they_are_averaged(tmp_path: Path) -> None:
    for averages in ((), ("*.running_mean",)):
        with pytest.raises(TaskError, match=r"module 1 \(BatchNorm1d\)[\s\S]*average_buffers="):
            train(tmp_path, task(batch_normed, averages=averages), steps=1)


def test_a_name_of_no_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"average_buffers names tabel, [\s\S]* there are table"):
        train(tmp_path, task(lambda: Scaled(type), averages=["tabel"]), steps=1)


@pytest.mark.parametrize("mode", [{}, {"deterministic": True}], ids=["fast", "deterministic"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: Scaled(look),
        lambda: Scaled(type),
        lambda: Scaled(replace, persistent=False),
        lambda: Scaled(fill_late, persistent=False),
        lambda: nn.Linear(4, 4),
    ],
    ids=["looked at", "left alone", "not persistent", "filled late", "without"],
)
def test_a_model_without_state_in_buffers_trains_and_resumes(
    tmp_path: Path, build: Callable[[], nn.Module], mode: dict[str, bool]
) -> None:
    """Filling, moving, evaluating and loading touch the very same tensors."""
    script = task(build, evaluates=True)
    train(tmp_path, script, steps=2, **mode)

    train(tmp_path, script, steps=4, **mode)

    assert len((tmp_path / "metrics/rank0.jsonl").read_text().splitlines()) == 4


def test_a_tensor_of_the_same_value_is_let_be_until_it_has_another() -> None:
    """A model may convert a table when it is used first; it would do so again when it resumes."""
    model: Any = Scaled(look)
    buffers = PersistentBuffers(model)
    for step, dtype in ((1, torch.bfloat16), (2, torch.float32)):
        buffers.begin_step(step)
        model.table = model.table.to(dtype)
        buffers.end_pass(0, step)
        assert not buffers.have_changed

    model.table[0] += 1

    with pytest.raises(TaskError, match="before step 3") as refused:
        buffers.begin_step(3)
    assert refused.value.facts == {"module": "", "buffer": "table", "step": 3}
