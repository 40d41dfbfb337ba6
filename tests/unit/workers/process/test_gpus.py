"""How simulated nodes and their workers divide the GPUs of a machine."""

import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers import collectives
from workers.process import gpus_here, gpus_of_node, share_of_gpu

SIZES = st.integers(min_value=1, max_value=9)


@given(workers=SIZES, nodes=SIZES, num_gpus=SIZES)
def test_all_workers_fit_on_their_nodes_and_on_the_machine(
    workers: int, nodes: int, num_gpus: int
) -> None:
    """Ray puts as many workers on a GPU as fit there whole, and no worker on two."""
    share = share_of_gpu(workers, nodes, num_gpus)

    on_one = math.floor(1 / share)
    gpus = tuple(map(str, range(num_gpus)))
    of_nodes = [gpus_of_node(node, nodes, gpus) for node in range(nodes)]

    assert 0 < share <= 1
    assert all(on_one * len(own) >= math.ceil(workers / nodes) for own in of_nodes)
    assert on_one * num_gpus >= workers
    if num_gpus >= nodes:
        assert sum(map(len, of_nodes)) == len(set().union(*of_nodes)), "two nodes have one GPU"


def test_a_machine_without_gpus_has_none_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the user's names them, and there may be no driver."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    assert gpus_here() == ()
    assert gpus_of_node(1, 2, ()) == ()


@pytest.mark.parametrize(
    ("version", "told"),
    [((2, 28, 9), {"NCCL_HOSTID": "w0003"}), ((2, 30, 7), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})],
)
def test_ranks_of_one_gpu_are_told_so_as_their_nccl_wants_it(
    version: tuple[int, ...], told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses two ranks on a GPU; too many channels of them would wait for ever."""
    names = ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE")
    for name in names:
        # Set first, so that it is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)

    collectives.share_device("w0003", 0.25)

    seen = {name: os.environ[name] for name in names if name in os.environ}
    assert seen == {**told, "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
