"""Training state as a map: read, write, convert and compare checkpoints, without Ray or torch.

This page documents the library's public names. Everything else is found in the rooms below.

Example::

    import ucp_core

    checkpoint = ucp_core.open("runs/demo/checkpoints/step-00001200")
    entry = checkpoint.state_map.entries[ucp_core.TensorKey("lm_head.weight", "weight")]
    rows = ucp_core.Box.full(entry.shape).with_dim(0, 0, 2)
    data = bytearray(rows.num_elements * ucp_core.DTYPE_BYTES[entry.dtype])
    need = ucp_core.LocalTensor(
        fqn=entry.key.fqn,
        slot=entry.key.slot,
        dtype=entry.dtype,
        shape=entry.shape,
        box=rows,
        data=memoryview(data),
    )
    ucp_core.load(checkpoint, [need])

    place = ucp_core.open_store("exported")
    ucp_core.convert(checkpoint, *place, memory_bytes=512 << 20)
    assert ucp_core.diff(checkpoint, ucp_core.open("exported")).equal
    assert not ucp_core.verify(ucp_core.open("exported"))

Reading:

- ``open(url, rules=, rename=, tag=)``: the ``Checkpoint`` at a path or URL, whatever its format.
- ``load(checkpoint, need)``: fill the memory of every ``LocalTensor``; each byte is verified.
  ``widen=True`` fills wider floats than the checkpoint has.
- ``load_together(checkpoint, need, ...)``: the same, each byte read by one of several ranks.
- ``verify(checkpoint)``: read every byte; return every problem.
- ``diff(a, b)``: compare two checkpoints tensor by tensor.

Writing. A destination is a store and a path in it; ``open_store(url)`` returns both:

- ``save_rank(store, directory, ...)``: write one rank's part; the last rank commits.
- ``find_committed(store, directory, lineage=)``: the newest checkpoint of a run that counts.
- ``collect_garbage(store, directory, keep=, lineage=)``: delete older ones.
- ``convert(checkpoint, store, directory, memory_bytes=)``: make a universal checkpoint.
- ``export(checkpoint, store, directory, format=, memory_bytes=)``: write another format.

Values: ``Checkpoint``, ``LocalTensor``, ``Box``, ``TensorKey``, ``DTYPE_BYTES``. Every error that
the library raises on purpose derives from ``UcpError`` (``ucp_core.errors``).

Rooms; each imports only those before it: ``numerics``, ``geometry``, ``storage``,
``manifest``, ``reading``, ``native``, ``language``, ``torch_files``, ``formats``, ``conversion``,
``inspection``, ``commands``. ``SPEC.md`` defines the format, ``RULES.md`` the language for shards,
``FORMATS.md`` what is read and written of other frameworks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucp_core.conversion import convert
    from ucp_core.errors import UcpError
    from ucp_core.formats import export
    from ucp_core.geometry import DTYPE_BYTES, Box, TensorKey
    from ucp_core.inspection import diff, verify
    from ucp_core.language import Rules
    from ucp_core.native import (
        Checkpoint,
        LocalTensor,
        collect_garbage,
        find_committed,
        load,
        load_together,
        save_rank,
    )
    from ucp_core.storage import open_store

__all__ = [
    "DTYPE_BYTES",
    "Box",
    "Checkpoint",
    "LocalTensor",
    "TensorKey",
    "UcpError",
    "collect_garbage",
    "convert",
    "diff",
    "export",
    "find_committed",
    "load",
    "load_together",
    "open",
    "open_store",
    "save_rank",
    "verify",
]

__getattr__ = lazy_door(__name__)


def open(  # noqa: A001 - ``ucp_core.open`` says what it does
    url: str | os.PathLike[str],
    *,
    rules: Rules | None = None,
    rename: Mapping[str, str] | None = None,
    tag: str | None = None,
) -> Checkpoint:
    """Open a checkpoint of any known format; its headers are read, no tensor is.

    Args:
        url: A directory, or an fsspec URL such as ``s3://bucket/run/checkpoints/step-00001200``.
        rules: How ranks cut the tensors, where the source does not say so itself.
        rename: New fqn by the source's fqn.
        tag: Which of several checkpoints in the directory, where the format has such names.

    Raises:
        UcpError: As ``ucp_core.formats.open_source``.
    """
    from ucp_core.formats import open_source
    from ucp_core.storage import open_store

    return open_source(*open_store(os.fspath(url)), rules=rules, rename=rename, tag=tag)
