import pytest
import torch

from workers.models import PRESETS, Decoder, num_parameters, stage_layers


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


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head", "expected"),
    [
        (8, 3, 0.0, [2, 3, 3]),
        # A vocabulary as large as Llama's costs as much as four small layers.
        (16, 2, 4.3, [10, 6]),
        (16, 4, 4.3, [5, 5, 5, 1]),
        (4, 4, 9.0, [1, 1, 1, 1]),
    ],
)
def test_the_last_stage_has_fewer_layers_for_its_output(
    num_layers: int, num_stages: int, head: float, expected: list[int]
) -> None:
    """A pipeline is as fast as the stage with the most to compute; each has a layer."""
    stages = [stage_layers(num_layers, number, num_stages, head) for number in range(num_stages)]

    assert [len(stage) for stage in stages] == expected
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
