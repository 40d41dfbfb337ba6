"""The data that ``session.steps`` accepts, and its messages about other objects."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import (
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from everstep import DataError, DataLoader, Session, TaskError, run

ROWS = torch.linspace(-1, 1, 32).reshape(16, 2)


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


def seen_in(directory: Path, data: Any, **train: Any) -> list[Any]:
    """Train four steps of four samples on ``data``; return the batches."""
    seen: list[Any] = []

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))

        def loss_of(batch: Any) -> Any:
            seen.append(batch)
            return model(batch[0] if isinstance(batch, list) else batch).square().mean()

        for _ in session.steps(data):
            session.train_step(loss_of)

    run(task, directory=str(directory), steps=4, global_batch=4, micro_batch=2, **train)
    return seen


@pytest.mark.parametrize(
    ("data", "is_in_order"),
    [
        (list(ROWS), False),
        (ROWS, False),
        (TensorDataset(ROWS), False),
        (Rows(), True),
        # These give one sample after the other: there is nothing to choose.
        (TorchLoader(TensorDataset(ROWS), batch_size=None), True),
    ],
    ids=["list", "tensor", "dataset", "iterable", "samples"],
)
def test_a_dataset_is_read_as_by_a_loader_of_ours(
    tmp_path: Path,
    data: Any,
    is_in_order: bool,  # noqa: FBT001
) -> None:
    """AttributeError: ... 'is_stream' was all that was said."""
    batches = seen_in(tmp_path, data)

    assert len(batches) == 8
    rows = torch.cat([one[0] if isinstance(one, list) else one for one in batches])
    assert rows.shape == (16, 2)
    assert torch.equal(rows, ROWS) == is_in_order
    assert {tuple(row) for row in rows.tolist()} == {tuple(row) for row in ROWS.tolist()}


@pytest.mark.parametrize(
    "loader",
    [
        TorchLoader(TensorDataset(ROWS), batch_size=2, shuffle=True),
        TorchLoader(TensorDataset(ROWS)),
        TorchLoader(TensorDataset(ROWS), batch_sampler=[[0, 1], [2, 3]]),
        TorchLoader(Rows(), batch_size=4),
    ],
    ids=["shuffled", "single", "batch_sampler", "iterable"],
)
def test_a_loader_of_batches_is_refused_with_what_to_hand_over(tmp_path: Path, loader: Any) -> None:
    """Its batches would be taken for samples, and a step would see twice as many."""
    with pytest.raises(DataError, match=r"everstep\.DataLoader\(loader\.dataset, collate_fn="):
        DataLoader(loader)
    with pytest.raises(TaskError, match=r"Pass its dataset"):
        seen_in(tmp_path, loader)


@pytest.mark.parametrize("data", [{"text": ["a"]}, "train.jsonl", iter(ROWS)])
def test_what_is_no_dataset_is_refused_by_name(tmp_path: Path, data: Any) -> None:
    """A dictionary has a length and is indexed, by other things than numbers."""
    with pytest.raises(TaskError, match=r"DataError: .*(not a dataset|at most once)"):
        seen_in(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (0, "an integer, at least 1"),
        (23.0, "an integer, at least 1"),
        (datasets.Dataset.from_dict({"a": range(16)}).to_pandas(), r"frame\.to_dict\('records'\)"),
    ],
    ids=["none", "float", "frame"],
)
def test_other_data_is_refused_with_what_to_hand_over(
    tmp_path: Path, data: Any, advice: str
) -> None:
    """An assertion, a KeyError and a float that "can be iterated only once" did not help."""
    with pytest.raises(TaskError, match=rf"DataError: .*{advice}"):
        seen_in(tmp_path, data)


def test_a_stream_cannot_be_rechecked_and_the_error_names_the_ways_out(tmp_path: Path) -> None:
    """Its samples are read once, so no worker could compute those of another one again."""
    ways = r"train\.recheck has .* from a stream .*: pass samples by index, .*recheck: 0"
    with pytest.raises(TaskError, match=ways):
        seen_in(tmp_path, Rows(), recheck=2, deterministic=True)
    assert len(seen_in(tmp_path, list(ROWS), recheck=2, deterministic=True)) == 8


def test_an_evaluation_counts_every_sample(tmp_path: Path) -> None:
    """``evaluate(f, 21)`` counted 20."""
    counted: list[int] = []
    found: list[float] = []
    rows = torch.arange(21.0)

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))

        def loss_of(indices: Any) -> Any:
            counted.extend(indices.tolist())
            return rows[indices].mean(), len(indices)

        for _ in session.steps(len(ROWS)):
            session.train_step(lambda indices: model(ROWS[indices]).square().mean())
            found.append(session.evaluate(loss_of, 21))

    run(task, directory=str(tmp_path), steps=1, global_batch=4, micro_batch=2)

    assert counted == list(range(21))
    assert found == [10.0]


def test_an_evaluation_takes_what_training_takes(tmp_path: Path) -> None:
    """ "iteration over a 0-d tensor" answered the function of the loss that trains."""
    rows = torch.arange(21.0)
    found: list[float] = []

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for _ in session.steps(len(ROWS)):
            session.train_step(lambda indices: model(ROWS[indices]).square().mean())
            found.append(session.evaluate(lambda indices: rows[indices].mean(), len(rows)))
            found.append(session.evaluate(torch.mean, rows))
            found.append(session.evaluate(torch.mean, DataLoader(list(rows), num_workers=1)))
            session.evaluate(lambda indices: {"loss": rows[indices].mean()}, len(rows))

    with pytest.raises(TaskError, match=r"session\.evaluate: the function must return .* dict"):
        run(task, directory=str(tmp_path), steps=1, global_batch=4, micro_batch=2)

    assert found == [10.0] * 3


def test_a_sampler_gives_the_order_through_a_resume(tmp_path: Path) -> None:
    """It is asked again for the epoch that the run was in; another one would lose samples."""

    def train(name: str, steps: int, sampler: Any) -> list[Any]:
        seen: list[Any] = []

        def task(session: Session) -> None:
            model = session.model(lambda: nn.Linear(2, 2))
            session.optimizer(lambda named: torch.optim.SGD(named.values()))

            def loss_of(batch: Any) -> Any:
                seen.extend(batch.tolist())
                return model(ROWS[batch]).square().mean()

            for _ in session.steps(DataLoader(range(16), sampler=sampler)):
                session.train_step(loss_of)

        run(task, directory=str(tmp_path / name), steps=steps, global_batch=4, micro_batch=2)
        return seen

    def weighted() -> Any:
        return WeightedRandomSampler([1.0] * 15 + [9.0], 6)

    whole = train("whole", 6, weighted())
    parts = train("parts", 2, weighted()) + train("parts", 6, weighted())
    assert parts == whole
    assert len(whole) == 24
    with pytest.raises(TaskError, match="sampler is 0 but the checkpoint of step 6"):
        train("parts", 7, None)
    with pytest.raises(TaskError, match="sampler is"):
        train("parts", 7, SubsetRandomSampler(range(6)))


def test_an_evaluation_takes_what_a_sampler_chooses(tmp_path: Path) -> None:
    found: list[float] = []

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for _ in session.steps(16):
            session.train_step(lambda at: model(ROWS[at]).square().mean())
        held_out = DataLoader(range(16), sampler=SubsetRandomSampler([1, 3, 5, 7, 9]))
        found.append(session.evaluate(lambda batch: batch.double().mean(), held_out))

    run(task, directory=str(tmp_path), steps=1, global_batch=4, micro_batch=2)

    assert found == [5.0]
