"""Whole weights of a sharded model: their digest, and a file of them for other tools.

Every rank calls each function. One whole tensor is in memory at a time.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ucp_core.errors import StorageError, UcpError
from ucp_core.formats import print_header
from ucp_core.storage import Buffer, join
from workers import collectives
from workers.errors import ApartError, TaskError
from workers.parallel import drop_gathered, own_names
from workers.protocol import SAVED
from workers.state import DTYPES, TORCH_DTYPES
from workers.train.executor import ShardedModel, all_agree, exchanged, summed

#: Names that a script may give to a file that it saves.
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def digest_of_weights(sharded: ShardedModel) -> str:
    """Return a SHA-256 over all weights, as float32, in the order of their names, hexadecimal.

    It is the same for every layout.
    """
    digest = hashlib.sha256()
    for fqn, shape in sorted(sharded.shapes.items()):
        whole = _whole_parameter(sharded, fqn, shape, torch.float32)
        digest.update(fqn.encode())
        digest.update(_bytes(whole))
    return digest.hexdigest()


def path_to_save(name: str) -> str:
    """Return the path in the run directory of the weights that a script saves as ``name``."""
    if not _PLAIN_NAME.fullmatch(name):
        raise TaskError(f"session.save: {name!r} must be of letters, digits, '.', '-' and '_'")
    apart = collectives.places().meet(f"session.save({name!r})")
    if apart:
        raise ApartError(
            f"session.save({name!r}) is called by some workers only, and each has a part of "
            f"the weights: {collectives.described(apart)}. Call it on all workers"
        )
    return join(SAVED, name, "model.safetensors")


def write_weights(
    sharded: ShardedModel, write: Callable[[Iterable[Buffer]], None], **metadata: str
) -> None:
    """Write parameters and persistent buffers to a safetensors file, on rank 0.

    Names and values are those of ``state_dict()`` of the whole model. Shared parameters occur under
    each of their names. ``write`` writes chunks to the file.
    """
    # A gathered parameter is another object than its shard.
    drop_gathered(sharded.model)
    tensors = sorted(_described(sharded), key=lambda one: (-one.dtype.itemsize, one.name))
    header = print_header(
        [(one.name, DTYPES[one.dtype], one.shape) for one in tensors], {"format": "pt", **metadata}
    )
    wholes = (_whole(sharded, one) for one in tensors)
    error: UcpError | None = None
    if sharded.mesh.rank == 0:
        try:
            write(itertools.chain([header], map(_bytes, wholes)))
        except UcpError as failure:
            error = failure
    # The other ranks write no file, and after a failure they still wait in collectives for these.
    for _ in wholes:
        pass
    if not all_agree(error is None, sharded.device):
        raise error or StorageError("rank 0 could not write the weights; see its error")


class _Tensor(NamedTuple):
    """A tensor of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: str  #: Name of the parameter; "" for a buffer.
    holder: int  #: The rank that has a buffer.


def _described(sharded: ShardedModel) -> list[_Tensor]:
    """Return every tensor of the model, including those of other pipeline stages."""
    owners = {id(shard.parameter): shard.fqn for shard in sharded.shards}
    named = own_names(sharded.model.named_parameters(remove_duplicate=False))
    rank = sharded.mesh.rank if sharded.pipeline is not None else 0
    mine = [
        _Tensor(name, one.dtype, tuple(one.shape), owners[id(one)], rank)
        for name, one in named.items()
    ]
    mine += [
        _Tensor(name, one.dtype, tuple(one.shape), "", rank)
        for name, one in sharded.buffers.named().items()
    ]
    if sharded.pipeline is None:
        return mine
    found: dict[str, _Tensor] = {}
    for rows in exchanged(
        [[*one[:1], DTYPES[one.dtype], *one[2:]] for one in mine], sharded.device
    ):
        for name, dtype, shape, source, holder in rows:
            found.setdefault(name, _Tensor(name, TORCH_DTYPES[dtype], tuple(shape), source, holder))
    return list(found.values())


def _whole(sharded: ShardedModel, one: _Tensor) -> Tensor:
    if one.source:
        return _whole_parameter(sharded, one.source, one.shape, one.dtype)
    whole = torch.zeros(one.shape, dtype=one.dtype, device=sharded.device)
    if one.holder == sharded.mesh.rank:
        whole.copy_(sharded.buffers.named()[one.name])
    return summed(whole)


def _whole_parameter(
    sharded: ShardedModel, fqn: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return a parameter of this shape, on every rank."""
    whole = torch.zeros(shape, dtype=dtype, device=sharded.device)
    shard = next((shard for shard in sharded.shards if shard.fqn == fqn), None)
    if shard is not None and shard.replicas[0] == sharded.mesh.rank:
        for box, local in shard.pieces(shard.local):
            whole[tuple(map(slice, box.start, box.stop))] = local
    return summed(whole)


def _bytes(whole: Tensor) -> memoryview:
    values: Any = whole.cpu().reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)
