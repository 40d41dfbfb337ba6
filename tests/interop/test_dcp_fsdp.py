"""FSDP2 and tensor parallel train on from what we read and wrote, with torch's own loader."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.foreign_reading import loaded
from tests.support.ranks import running
from tests.support.train_fsdp import (
    Save,
    Seen,
    build,
    load,
    load_and_train,
    look,
    train,
    train_and_save,
)
from ucp_core.conversion import convert
from ucp_core.formats import open_source
from ucp_core.formats.dcp import writer as dcp_writer
from ucp_core.inspection import diff
from ucp_core.native import open_checkpoint
from ucp_core.storage import LocalStore

MEMORY = 8 << 20

pytestmark = [
    # Four processes import torch, on as few processors as there are.
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled:UserWarning",
    ),
]


class Run(NamedTuple):
    """A run of FSDP2 over 2 ranks: its state after 2 steps, and the losses of the next 2."""

    nested: str
    flat: str
    seen: Seen
    after: list[float]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """13 rows over 2 ranks are uneven."""
    root = tmp_path_factory.mktemp("fsdp")
    nested, flat = str(root / "nested"), str(root / "flat")
    saves = [Save(nested, flatten=False), Save(flat, flatten=True)]
    (root / "ranks").mkdir()
    with running(partial(train_and_save, fsdp=2, tp=1, saves=saves), 2, root / "ranks") as ranks:
        seen, after = ranks.results()[0]
    return Run(nested, flat, seen, after)


def test_what_fsdp2_saved_is_read_bit_for_bit(run: Run) -> None:
    """In both conventions of the optimizer's keys; frozen, tied and counting things too."""
    for directory in (run.nested, run.flat):
        checkpoint = open_source(LocalStore(), directory)

        assert {(k.fqn, k.slot) for k in checkpoint.state_map.entries} == run.seen.state.keys()
        for (fqn, slot), whole in run.seen.state.items():
            assert loaded(checkpoint, fqn, slot).numpy().tobytes() == whole.tobytes(), (fqn, slot)
        assert checkpoint.manifest.ties == {"head.weight": "embed.weight"}
        assert checkpoint.step == 2
        lrs = {fqn: g["lr"] for g in checkpoint.param_groups for fqn in g["params"]}
        assert lrs["embed.weight"] == 1e-2
        assert lrs["blocks.0.norm.bias"] == 2e-2


@pytest.fixture(scope="module")
def written(run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[Save]:
    """Our exports of it: from DCP itself and from a universal checkpoint, in each convention."""
    root = tmp_path_factory.mktemp("written")
    store = LocalStore()
    source = open_source(store, run.nested)
    convert(source, store, str(root / "universal"), memory_bytes=MEMORY, processes=1)
    universal = open_checkpoint(store, str(root / "universal"))
    assert diff(source, universal).equal
    saves = []
    for name, checkpoint in (("dcp", source), ("universal", universal)):
        for flatten in (False, True):
            save = Save(str(root / f"{name}-{flatten}"), flatten=flatten)
            dcp_writer.write(
                checkpoint, store, save.directory, memory_bytes=MEMORY, flatten_optimizer=flatten
            )
            saves.append(save)
    return saves


def _assert_same(seen: Seen, run: Run) -> None:
    assert seen.state.keys() == run.seen.state.keys()
    for name, whole in run.seen.state.items():
        assert seen.state[name].dtype == whole.dtype, name
        assert seen.state[name].tobytes() == whole.tobytes(), name
    for found, expected in zip(seen.groups, run.seen.groups, strict=True):
        assert found == expected


def test_stock_dcp_loads_it_under_fsdp2_x_tp2(
    run: Run, written: list[Save], tmp_path: Path
) -> None:
    """Other shards along other dims, of either convention; the same bits and the next losses."""
    function = partial(load_and_train, fsdp=2, tp=2, saves=[written[0], written[-1]])
    with running(function, 4, tmp_path) as ranks:
        results = ranks.results()

    for rank in results:
        for seen, losses in rank:
            _assert_same(seen, run)
            # Tensor parallel adds in another order.
            np.testing.assert_allclose(losses, run.after, rtol=1e-6)


def test_stock_dcp_loads_it_under_the_same_layout_and_trains_on_alike(
    run: Run, written: list[Save], tmp_path: Path
) -> None:
    """The same order of additions, so the losses are the same bits."""
    function = partial(load_and_train, fsdp=2, tp=1, saves=written[-1:])
    with running(function, 2, tmp_path) as ranks:
        ((seen, losses),) = ranks.results()[0]

    _assert_same(seen, run)
    assert losses == run.after


def test_stock_dcp_loads_it_in_a_single_process(run: Run, written: list[Save]) -> None:
    """Without a process group, into an unsharded model."""
    for save in written:
        model, optimizer = build(1, 1)

        step = load(model, optimizer, save)

        _assert_same(look(model, optimizer, []), run)
        losses = train(model, optimizer, range(step, step + 2), 1)
        np.testing.assert_allclose(losses, run.after, rtol=1e-6)
