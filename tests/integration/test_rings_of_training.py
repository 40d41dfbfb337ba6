"""Ranks train in real processes with a fault in some of them; their rings say what it was."""

import functools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.driver import diagnose_paths
from orchestrator.fault_kinds import FaultKind
from tests.support.made import assignment_of
from tests.support.ranks import Place, running
from ucp_core.layout import ParallelLayout
from ucp_core.storage import open_store
from workers.parallel import ModelPlan
from workers.settings import CheckpointSettings, ParallelSettings, Settings, TrainSettings
from workers.telemetry import ProgressRecord, read_ring
from workers.train import Session, WorkerContext, run_attempt

NUM_RANKS = 4
WIDTH = 32
NUM_LAYERS = 4
#: Times of a layer and a sample, as sleeps: they take as long on a busy machine.
LAYER_S = 0.005
SLOW_FROM_STEP = 7


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.work_s = nn.Linear(WIDTH, WIDTH), LAYER_S

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.work_s)
        return torch.tanh(self.linear(value))


class Samples:
    """Samples that come late."""

    def __init__(self) -> None:
        self.late_s = 0.0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.late_s)
        return torch.full((WIDTH,), float(index))


def keep_stage(model: nn.Module, number: int, num_stages: int) -> None:
    """Leave the layers of a stage in ``model``."""
    assert isinstance(model, nn.Sequential)
    for place in range(NUM_LAYERS):
        if place * num_stages // NUM_LAYERS != number:
            model[place] = nn.Identity()


def train(slow: int, starved: int, skips: int, settings: Settings, place: Place) -> None:
    """Train with ranks of which one computes slowly, one gets data late, one skips a call."""
    parallel = settings.parallel
    layout = ParallelLayout(dp_shard=NUM_RANKS // parallel.pp, pp=parallel.pp)
    samples = Samples()

    def task(session: Session) -> None:
        model = session.model(
            lambda: nn.Sequential(*(Layer() for _ in range(NUM_LAYERS))),
            plan=ModelPlan(keep_stage=keep_stage),
        )
        session.optimizer(lambda parameters: torch.optim.SGD(parameters.values()))
        layers = [one for one in model.modules() if isinstance(one, Layer)]
        for step in session.steps(samples):
            is_late = step.number >= SLOW_FROM_STEP
            for layer in layers:
                layer.work_s = LAYER_S * (3 if is_late and place.rank == slow else 1)
            samples.late_s = 10 * LAYER_S if is_late and place.rank == starved else 0.0
            session.train_step(lambda batch: model(batch).square().mean())
            if place.rank != skips or step.number != SLOW_FROM_STEP:
                dist.all_reduce(torch.ones(4))
            dist.all_gather([torch.ones(4) for _ in range(NUM_RANKS)], torch.ones(4))

    store, path = open_store(str(place.directory / "run"))
    page = ProgressRecord.create(place.progress_path, worker=f"w{place.rank}")
    context = WorkerContext(
        worker=f"w{place.rank}",
        settings=settings,
        store=store,
        directory=path,
        progress=page,
        ring_path=str(place.ring_path),
        yield_requested=lambda _attempt: False,
        fenced=lambda _attempt: False,
        node=f"n{place.rank}",
    )
    assignment = assignment_of(place.rank, layout=layout, store_port=place.port)
    run_attempt(assignment, context, task)
    page.close()


def _settings(*, steps: int = 14, pp: int = 1, stages_per_worker: int = 1) -> Settings:
    return Settings(
        train=TrainSettings(steps=steps, global_batch=8 * pp, micro_batch=1),
        parallel=ParallelSettings(
            pp=pp, stages_per_worker=stages_per_worker, collective_timeout_s=5.0
        ),
        checkpoint=CheckpointSettings(every_steps=steps),
    )


def _told(directory: Path) -> set[tuple[FaultKind, tuple[int, ...], tuple[str, ...]]]:
    found = diagnose_paths([str(directory)])
    return {(one.kind, one.guilty.ranks, one.guilty.nodes) for one in found}


def test_rings_name_who_computes_slowly_and_who_gets_data_late(tmp_path: Path) -> None:
    """The others take as long for each step, because they wait for these two."""
    work = functools.partial(train, 2, 1, -1, _settings())
    with running(work, NUM_RANKS, tmp_path) as ranks:
        ranks.results()

    assert _told(tmp_path) == {
        (FaultKind.SLOW_COMPUTE, (2,), ("n2",)),
        (FaultKind.SLOW_DATA, (1,), ("n1",)),
    }
    told = CliRunner().invoke(app, ["diagnose", str(tmp_path)]).output
    assert "slow_compute: rank 2, node n2." in told
    assert "slow_data: rank 1, node n1." in told


@pytest.mark.chaos
def test_rings_name_who_skipped_a_call(tmp_path: Path) -> None:
    """The others see a collective that fails, or ends at its timeout."""
    work = functools.partial(train, -1, -1, 3, _settings(steps=9))
    with running(work, NUM_RANKS, tmp_path) as ranks:
        ranks.results()

    ((kind, guilty, _),) = _told(tmp_path)

    assert kind in {FaultKind.MISMATCH, FaultKind.DESYNC}
    assert guilty == (3,)


@pytest.mark.chaos
@pytest.mark.parametrize("stages_per_worker", [1, 2])
def test_a_slow_stage_of_a_pipeline_is_named_alone(tmp_path: Path, stages_per_worker: int) -> None:
    """Its mates wait for it in transfers, between the passes of their own."""
    settings = _settings(pp=2, stages_per_worker=stages_per_worker)
    with running(functools.partial(train, 3, -1, -1, settings), NUM_RANKS, tmp_path) as ranks:
        ranks.results()

    rings = [read_ring(place.ring_path) for place in ranks.places]
    for ring in rings:
        spans = [one for one in ring.records if one.group < 0 and one.step == 2]
        passes = [(one.op, one.micro_batch) for one in spans if one.op in {"forward", "backward"}]
        assert sorted(passes) == sorted(
            stages_per_worker * [(op, n) for op in ("forward", "backward") for n in range(8)]
        )
    assert [ring.place for ring in rings] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    assert _told(tmp_path) == {(FaultKind.SLOW_COMPUTE, (3,), ("n3",))}
