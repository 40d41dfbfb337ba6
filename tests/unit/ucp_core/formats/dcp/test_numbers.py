"""Numbers where names or tensors should be."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp_peer
from torch import nn

from tests.support.dcp_files import Save, write
from ucp_core.errors import CheckpointCorruptError, UnsupportedVersionError
from ucp_core.formats.dcp import reader as dcp
from ucp_core.storage import LocalStore, MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_an_optimizer_without_names_is_refused(tmp_path: Path) -> None:
    """``optimizer.state_dict()`` as it is numbers parameters; a guess would swap their moments."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    made = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).square().sum().backward()
    made.step()
    state = {"model": model.state_dict(), "optimizer": made.state_dict()}
    dcp_peer.save(state, checkpoint_id=tmp_path, no_dist=True)

    with pytest.raises(UnsupportedVersionError, match="get_optimizer_state_dict"):
        dcp.read(LocalStore(), str(tmp_path))


@pytest.mark.parametrize(("slot", "value"), [("step", 1e300), ("n", 2**70)])
def test_a_number_that_no_tensor_holds_is_an_error_of_ours(slot: str, value: float) -> None:
    """Python's integers have no end."""
    store = MemoryStore()
    save = Save(objects={f"optim.state.w.{slot}": value})
    save.whole("model.w", torch.ones(2))
    write(store, "c", save)

    with pytest.raises(CheckpointCorruptError, match=rf"w \({slot}\) is a number that"):
        dcp.read(store, "c")
