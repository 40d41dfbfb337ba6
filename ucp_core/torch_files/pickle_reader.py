"""Reads a pickle as plain values: see ``pickle_machine``, which executes nothing."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError
from ucp_core.torch_files.pickle_classes import Allow, Global, Opaque, Resolver
from ucp_core.torch_files.pickle_machine import interpret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PICKLE_BYTES_MAX", "Allow", "Global", "Opaque", "collector_paused", "read_pickle"]

#: The largest pickle that is taken. The metadata of a million fragments has about 250 MB.
PICKLE_BYTES_MAX = 1 << 30


def read_pickle(
    data: bytes,
    *,
    where: str,
    allow: Allow = frozenset(),
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what ``data`` describes, made of plain values and stand-ins.

    Containers, numbers, strings and bytes come as themselves, ``OrderedDict`` and ``defaultdict``
    as ``dict``, ``torch.Size`` as ``tuple``, numpy scalars as Python's, arrays as ``NumpyArray``,
    classes and dtypes as ``Global``, objects of the allowed foreign classes as ``Opaque``.

    Args:
        data: One pickle.
        where: The file, for messages.
        allow: More classes: names (a name that ends with a dot allows all below it) that become
            ``Opaque``, or a mapping from a name to the function that makes the value.
        persistent: Resolves persistent ids; without it they are an error.

    Raises:
        ForeignClassError: Names a class that is not allowed, or data that cannot be read.
        CheckpointCorruptError: Not a pickle, cut short, or too large.
    """
    if len(data) > PICKLE_BYTES_MAX:
        raise CheckpointCorruptError(
            f"{where}: its pickle has {len(data)} bytes, more than {PICKLE_BYTES_MAX}: "
            "this is not a checkpoint",
            path=where,
        )
    with collector_paused():
        return interpret(bytes(data), Resolver(allow, where), where=where, persistent=persistent)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from looking at a million new objects again and again.

    It took a third of the time to open 20,000 chunks.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
