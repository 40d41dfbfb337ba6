"""Which modules are gathered as one, and what their parameters are called."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from workers.parallel import own_names
from workers.parallel.fsdp import _blocks


def layers(number: int = 2) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(number)]


class Inner(nn.Module):
    """The part of a model of Hugging Face that has the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(layers())


class HuggingFace(nn.Module):
    """``model.layers`` is not a child of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.lm_head = nn.Linear(2, 4, bias=False)


class NanoGPT(nn.Module):
    """Its layers are in a container of a container, beside an embedding that the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(4, 2), "h": nn.ModuleList(layers()), "ln": nn.LayerNorm(2)}
        )
        self.head = nn.Linear(2, 4, bias=False)
        embedding = self.transformer["wte"]
        assert isinstance(embedding, nn.Embedding)
        self.head.weight = embedding.weight


class Flat(nn.Module):
    """A list of layers of its own, and one deeper within, which belongs to its module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*layers(3))
        self.head = Inner()


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (HuggingFace, ["model.layers.0", "model.layers.1"]),
        (NanoGPT, ["transformer.h.0", "transformer.h.1", "transformer.ln"]),
        (Flat, ["blocks.0", "blocks.1", "blocks.2"]),
    ],
)
def test_layers_are_found_wherever_a_model_keeps_them(
    make: Callable[[], nn.Module], names: list[str]
) -> None:
    """Else a large model is one unit, and every worker has all of it in memory."""
    model = make()
    by_module = {module: name for name, module in model.named_modules()}

    assert [by_module[block] for block in _blocks(model)] == names


def test_a_model_that_can_only_be_gathered_as_a_whole_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A user who runs out of memory learns why."""
    with caplog.at_level(logging.WARNING):
        assert _blocks(nn.Linear(2, 2)) == []

    assert "gathers all its parameters at once" in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_parameter_is_called_the_same_however_it_is_wrapped() -> None:
    """A run is resumed after compilation or activation checkpointing was switched on or off."""

    def compiled(module: nn.Module) -> nn.Module:
        wrapped: Any = torch.compile(module)
        assert isinstance(wrapped, nn.Module)
        return wrapped

    plain = nn.Sequential(*layers())
    wrapped = nn.Sequential(compiled(plain[0]), checkpoint_wrapper(plain[1]))
    twice = compiled(nn.Sequential(checkpoint_wrapper(compiled(plain[0])), plain[1]))

    names = [name for name, _ in plain.named_parameters()]
    assert [*own_names(wrapped.named_parameters())] == names
    assert [*own_names(twice.named_parameters())] == names
    assert [*own_names([("my_orig_mod.weight", 1)])] == ["my_orig_mod.weight"]
