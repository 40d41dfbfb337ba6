"""Spreads the tensors of a DeepSpeed ``PipelineModule`` over stages and layer files.

Pure arithmetic on names: ``3.mlp.weight`` belongs to layer 3, ``tied_modules.embed.weight`` to
every layer of the tied module ``embed``. A layer file belongs to the whole run, not to a stage.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed.writing.model import Model, part_of

_NAME = re.compile(r"(?:(\d+)|tied_modules\.([^.]+))\.(.+)")


class Pipeline:
    """The stages of a run.

    Args:
        starts: First layer of every stage, ascending, the first one 0.
        tied_layers: The layers of each tied module by its key, ascending.
    """

    def __init__(self, starts: Sequence[int], tied_layers: Mapping[str, Sequence[int]]) -> None:
        if not starts or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise UcpError(f"stages={list(starts)} must ascend from 0: the first layers of stages")
        self._starts = tuple(starts)
        self._tied = {key: tuple(layers) for key, layers in tied_layers.items()}

    def place(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the layers that have a tensor, and its name in the first layer's file."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise UcpError(
                f"{name} is not a name of a PipelineModule, such as 3.mlp.weight: rename the "
                "tensors"
            )
        if match[1] is not None:
            return (int(match[1]),), match[3]
        layers = self._tied.get(match[2])
        if not layers:
            raise UcpError(f"{name}: tied_layers does not list the layers of {match[2]}")
        return layers, match[3]

    def models(self, model: Model) -> list[Model]:
        """Return the model of every stage; several stages hold a tied tensor."""
        by_stage: list[dict[str, list[str]]] = [defaultdict(list) for _ in self._starts]
        for name in model.weights:
            for layer in self.place(name)[0]:
                by_stage[bisect_right(self._starts, layer) - 1][name] = [name]
        return [part_of(model, held.__getitem__) for held in by_stage]

    def tied(self, model: Model) -> tuple[str, ...]:
        """Return the tensors that several layers share."""
        return tuple(name for name in model.weights if len(self.place(name)[0]) > 1)

    def layers(self, names: Iterable[str]) -> dict[int, dict[str, str]]:
        """Return the content of every layer's file: the model's name by the name in the file."""
        files: dict[int, dict[str, str]] = {}
        for name in names:
            layers, local = self.place(name)
            files.setdefault(layers[0], {})[local] = name
        return dict(sorted(files.items()))
