from __future__ import annotations

import pytest
import torch

from workers.models import PRESETS, Decoder, num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_the_counts_are_those_of_the_module(name: str) -> None:
    """Memory is planned with the arithmetic and spent by the module; a tied output is one."""
    shape = PRESETS[name]
    with torch.device("meta"):
        model = Decoder(shape)

    assert num_parameters(shape) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "millions"),
    [("small", 1), ("10m", 10), ("125m", 124), ("1b", 1236), ("3b", 3213), ("8b", 8030)],
)
def test_presets_are_as_large_as_they_are_called(name: str, millions: int) -> None:
    """1b, 3b and 8b are the published Llama 3 shapes, whose sizes are known."""
    assert round(num_parameters(PRESETS[name]) / 1e6) == pytest.approx(millions, rel=0.05)
