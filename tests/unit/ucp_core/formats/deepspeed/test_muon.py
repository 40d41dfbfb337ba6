"""Muon's momentum under ZeRO is of whole parameters, so a rank keeps more than its own part."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.deepspeed_folders import (
    Folder,
    Param,
    assert_equal,
    loaded,
    native,
    read,
    tensor,
)
from ucp_core.errors import UnsupportedVersionError

MODEL = [Param("a.weight", (5, 3)), Param("b.weight", (4, 4)), Param("c.weight", (3, 5))]


def _muon(model: list[Param], dp: int, *, is_offloaded: bool = False) -> Folder:
    """Return a checkpoint of Muon; offloaded, every rank has the momentum of its own elements."""
    folder = native(model, dp=dp)
    by_name = {param.name: param for param in model}
    for rank in range(dp):
        state = folder.optim(rank)
        base, (mapping,) = state["base_optimizer_state"], state["param_slice_mappings"]
        base["param_groups"][0]["use_muon"] = True
        whole = [by_name[name].value("exp_avg").ravel() for name in mapping]
        own = base["state"][0].pop("exp_avg")
        base["state"][0]["momentum_buffer"] = own if is_offloaded else tensor(np.concatenate(whole))
        del base["state"][0]["exp_avg_sq"]
    for name in by_name:
        folder.expected[name, "momentum_buffer"] = folder.expected.pop((name, "exp_avg"))
        del folder.expected[name, "exp_avg_sq"]
    return folder


@pytest.mark.parametrize("is_offloaded", [True, False])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_momentum_of_whole_parameters_is_read(
    tmp_path: Path, dp: int, *, is_offloaded: bool
) -> None:
    """Both ranks have all momentum of parameters that their border cuts."""
    folder = _muon(MODEL, dp, is_offloaded=is_offloaded)

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


def test_momentum_that_fits_in_two_ways_is_not_guessed(tmp_path: Path) -> None:
    """As flat as the masters with their padding, the second parameter's would be shifted by two."""
    folder = _muon([Param("a.weight", (2, 3)), Param("b.weight", (2, 4))], dp=2)

    with pytest.raises(UnsupportedVersionError, match="which fits both the 6 flat elements"):
        read(folder.write(tmp_path))


def test_momentum_of_another_size_is_refused(tmp_path: Path) -> None:
    """It belongs to unknown parameters."""
    folder = _muon(MODEL, dp=2)
    folder.optim(1)["base_optimizer_state"]["state"][0]["momentum_buffer"] = tensor(
        np.zeros(9, np.float32)
    )

    with pytest.raises(UnsupportedVersionError, match="has 9 elements, which fits neither"):
        read(folder.write(tmp_path))
