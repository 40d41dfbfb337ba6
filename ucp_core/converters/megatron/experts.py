"""Experts of expert parallel ranks: their numbers in the whole model, and their optimizer. Pure.

Every such rank numbers its own from 0 on, and repeats all that is no expert. Where there are
several, Megatron chains two optimizers: the second is that of the experts.
"""

from __future__ import annotations

import re

from ucp_core.errors import CheckpointCorruptError, UnsupportedVersionError

#: One module each (``SequentialMLP``), or one parameter each of one (``TEGroupedMLP``).
_SINGLE = re.compile(r"(.*\.experts\.local_experts\.)(\d+)(\..*)")
_GROUPED = re.compile(r"(.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)()")
_EXPERT = ".experts."


def is_expert(name: str) -> bool:
    """Return whether a parameter is one of experts."""
    return _EXPERT in name


def global_name(name: str, rank: int, num_local: int, file: str) -> str:
    """Return the name in the whole model of what one of several expert parallel ranks has.

    Raises:
        CheckpointCorruptError: The rank has more experts than it should.
        UnsupportedVersionError: Its experts are one parameter.
    """
    if not is_expert(name):
        return name
    match = _SINGLE.fullmatch(name) or _GROUPED.fullmatch(name)
    if match is None:
        raise UnsupportedVersionError(
            f"{file}: {name} holds the experts of a rank in one parameter, which cannot be put "
            "together over expert parallel ranks in this format; save in torch_dist format",
            file=file,
            fqn=name,
        )
    number = int(match[2])
    if number >= num_local:
        raise CheckpointCorruptError(
            f"{file}: {name} is expert {number} of a rank, of which args gives it {num_local}",
            file=file,
            fqn=name,
        )
    return f"{match[1]}{rank * num_local + number}{match[3]}"
