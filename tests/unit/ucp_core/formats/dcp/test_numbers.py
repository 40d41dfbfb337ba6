"""``optimizer.state_dict()`` as it is has no names; a wrong guess swaps moments silently."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp_peer
from torch import nn

from tests.support.dcp_files import Save, random_tensors, write
from tests.support.foreign_reading import loaded, same_bits
from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.dcp import reader as dcp
from ucp_core.native import Checkpoint
from ucp_core.storage import LocalStore, MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def _trained(model: nn.Module, groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    made = torch.optim.AdamW([{"params": group} for group in groups])
    model(torch.randn(5, 4)).square().sum().backward()
    made.step()
    return made


def _saved(model: nn.Module, made: torch.optim.Optimizer, directory: Path) -> Checkpoint:
    state = {"model": model.state_dict(), "optimizer": made.state_dict()}
    dcp_peer.save(state, checkpoint_id=directory, no_dist=True)
    return dcp.read(LocalStore(), str(directory))


def _assert_moments(checkpoint: Checkpoint, model: nn.Module, made: torch.optim.Optimizer) -> None:
    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad:
            moment = made.state[parameter]["exp_avg"]
            assert same_bits(loaded(checkpoint, fqn, "exp_avg"), moment), fqn


def _alike() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)), nn.Linear(4, 2))


def test_one_group_has_the_models_order(tmp_path: Path) -> None:
    """As the tutorial of DCP saves it; layers of one shape are told by nothing else."""
    model = _alike()
    made = _trained(model, [list(model.parameters())])
    checkpoint = _saved(model, made, tmp_path)
    _assert_moments(checkpoint, model, made)
    assert checkpoint.param_groups[0]["params"] == [fqn for fqn, _ in model.named_parameters()]


def test_groups_of_shapes_of_their_own_are_named(tmp_path: Path) -> None:
    """Numbers count group by group and not through the model; frozen ones and buffers have none."""
    model = _alike()
    model.register_buffer("seen", torch.arange(7))
    model.register_parameter("fixed", nn.Parameter(torch.ones(3), requires_grad=False))
    *weights, bias = [p for p in model.parameters() if p.requires_grad]
    made = _trained(model, [[bias], weights])
    checkpoint = _saved(model, made, tmp_path)
    _assert_moments(checkpoint, model, made)
    assert checkpoint.manifest.roles == {"seen": "buffer", "fixed": "frozen"}


@pytest.mark.parametrize("num_groups", [1, 2])
def test_statistics_of_batches_are_not_taken_for_parameters(
    tmp_path: Path, num_groups: int
) -> None:
    """They have the shape of the biases beside them, in every model that sees images."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    params = list(model.parameters())
    groups = [[p for p in params if p.ndim == ndim] for ndim in (1, 2)]
    made = _trained(model, groups if num_groups == 2 else [params])

    checkpoint = _saved(model, made, tmp_path)

    _assert_moments(checkpoint, model, made)
    assert checkpoint.manifest.roles["1.running_mean"] == "buffer"


@pytest.mark.parametrize("kind", ["groups of one shape", "a buffer of that shape"])
def test_what_could_be_anothers_is_refused(tmp_path: Path, kind: str) -> None:
    """By number alone, the moments of the last layers would be those of the first."""
    model = _alike()
    params = list(model.parameters())
    groups = [params]
    if kind == "groups of one shape":
        groups = [params[2:3], [*params[:2], *params[3:]]]
    else:
        model[1].register_buffer("mask", torch.ones(4, 4))
    made = _trained(model, groups)
    with pytest.raises(CheckpointCorruptError, match="saved by number"):
        _saved(model, made, tmp_path)


def _written_by_two_ranks(paths: dict[str, tuple[Any, ...]] | None) -> MemoryStore:
    """Save two layers of one shape as DDP does: the metadata begin with the first rank's."""
    store = MemoryStore()
    keys = ["optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg", "model.b.w", "model.a.w"]
    save = Save(paths=paths, objects={"optimizer.param_groups.0.params": [0, 1]})
    for key, tensor in random_tensors(dict.fromkeys(keys, (3, 2)), seed=1).items():
        save.whole(key, tensor, rank=int(key.endswith(("a.w", "0.exp_avg"))))
    write(store, "c", save)
    return store


def test_the_order_of_what_ranks_wrote_is_not_the_models() -> None:
    """Ranks of DDP share the work, so that what one wrote comes before what another did."""
    nested = {
        **{f"model.{name}.w": ("model", f"{name}.w") for name in "ab"},
        **{f"optimizer.state.{n}.exp_avg": ("optimizer", "state", n, "exp_avg") for n in (0, 1)},
        "optimizer.param_groups.0.params": ("optimizer", "param_groups", 0, "params"),
    }
    checkpoint = dcp.read(_written_by_two_ranks(nested), "c")
    wanted = random_tensors(
        dict.fromkeys(["optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg"], (3, 2)), seed=1
    )
    for number, fqn in enumerate(["a.w", "b.w"]):
        moment = wanted[f"optimizer.state.{number}.exp_avg"]
        assert same_bits(loaded(checkpoint, fqn, "exp_avg"), moment)


def test_an_order_that_nothing_tells_is_refused() -> None:
    """Older versions of DCP keep no nested state."""
    with pytest.raises(CheckpointCorruptError, match="in which order the model has"):
        dcp.read(_written_by_two_ranks(None), "c")


@pytest.mark.parametrize(("slot", "value"), [("step", 1e300), ("n", 2**70)])
def test_a_number_that_no_tensor_holds_is_an_error_of_ours(slot: str, value: float) -> None:
    """Python's integers have no end."""
    store = MemoryStore()
    save = Save(objects={f"optim.state.w.{slot}": value})
    save.whole("model.w", torch.ones(2))
    write(store, "c", save)

    with pytest.raises(CheckpointCorruptError, match=rf"w \({slot}\) is a number that"):
        dcp.read(store, "c")
