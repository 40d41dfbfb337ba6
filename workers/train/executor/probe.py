"""Check whether a rank's own results are finite, before they are summed over ranks.

A sum over ranks does not show which part was not finite. So each rank checks the gradients that it
gives to a reduction, and the outputs that it sends to the next stage. It reads nothing back from a
device unless a step turns out not to be finite.
"""

from typing import Final

import torch
from torch import Tensor

#: About this many elements of a tensor are checked, evenly spread. A number that is not finite
#: spreads over whole rows and columns in the next matrix product.
_LOOKED_AT: Final = 1 << 16


class Probe:
    """Checks the passes of each step."""

    def __init__(self) -> None:
        self._number = 0
        self._gradients: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}

    def begin(self, number: int) -> None:
        """Set the pass that ends with the next reductions of gradients."""
        self._number = number

    def see_gradient(self, gradient: Tensor) -> None:
        """Check the values that this rank gives to a reduction."""
        _note(self._gradients, self._number, gradient)

    def see_output(self, number: int, outputs: Tensor | tuple[Tensor, ...]) -> None:
        """Check the values that a stage sends on in pass ``number``."""
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if output.is_floating_point():
                _note(self._outputs, number, output.detach())

    def gradients(self) -> list[int]:
        """Return the passes whose reductions got a number that is not finite; waits for a device.

        A reduction covers the gradients of all passes since the previous reduction.
        """
        return [number for number, flag in self._gradients.items() if not flag.isfinite()]

    def outputs(self) -> list[int]:
        """Return the passes with outputs that are not finite; waits for a device."""
        return [number for number, flag in self._outputs.items() if not flag.isfinite()]

    def clear(self) -> None:
        """Forget the step."""
        self._gradients, self._outputs = {}, {}


def _note(flags: dict[int, Tensor], number: int, values: Tensor) -> None:
    """Add 0 to a flag if ``values`` are finite, and nan otherwise."""
    flat = values.reshape(-1)
    flag = torch.mul(flat[:: max(1, flat.numel() // _LOOKED_AT)], 0.0).sum()
    flags[number] = flags[number] + flag if number in flags else flag
