"""Answers the questions of writers of other frameworks' formats about a checkpoint. Pure.

``transformers`` 5 has one tensor for the experts of a layer: ``gate_up_proj`` is
``[experts, 2 * rows, width]``, gate above up, and ``down_proj`` ``[experts, width, rows]`` in
Mixtral, Qwen3-MoE and DeepSeek-V3. Other models have them transposed, with gate and up in turn
(GPT-OSS, Llama 4).
"""

import re
from collections.abc import Iterable, Mapping

from ucp_core.errors import UcpError
from ucp_core.geometry import TensorEntry, TensorKey
from ucp_core.native import Checkpoint


def tensors_of(checkpoint: Checkpoint) -> dict[TensorKey, TensorEntry]:
    """Return the tensors of the model and its optimizer, sorted: all without the role ``extra``."""
    roles = checkpoint.manifest.roles
    entries = sorted(checkpoint.state_map.entries.items())
    return {key: entry for key, entry in entries if roles.get(key.fqn) != "extra"}


def weights_of(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Return the parameters and buffers by name, sorted."""
    return {k.fqn: entry for k, entry in tensors_of(checkpoint).items() if k.slot == "weight"}


_KINDS = ("gate_up", "down")
_DIMS = 3
_NAME = re.compile(r"(?P<layer>.+)\.experts\.(?P<kind>gate_up|down)_proj")


def stacked_experts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, re.Match[str]]:
    """Return the names of stacked experts, each with its ``layer`` and its ``kind``."""
    found = {name: match for name in shapes if (match := _NAME.fullmatch(name))}
    for name, match in found.items():
        pair = [shapes.get(f"{match['layer']}.experts.{kind}_proj", ()) for kind in _KINDS]
        up, down = pair
        if len(up) != len(down) or len(up) != _DIMS or up != (down[0], 2 * down[2], down[1]):
            raise UcpError(
                f"{name}: experts with the shapes {list(up)} and {list(down)} of {_KINDS[0]}_proj "
                f"and {_KINDS[1]}_proj are not those of Mixtral, Qwen3-MoE or DeepSeek-V3, which "
                "have gate above up, and cannot be written"
            )
    return found


def check_equal_shares(counts: Iterable[int], ep: int) -> None:
    """Raise an error unless ``ep`` ranks can share the experts of every layer equally."""
    told = sorted({*counts})
    if ep < 1 or (ep > 1 and not told) or any(count % ep for count in told):
        has = f"{', '.join(map(str, told)) or 'no'} experts in a layer"
        raise UcpError(f"ep={ep}: the source has {has}, which ep ranks cannot share equally")
