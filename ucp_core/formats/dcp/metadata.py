"""The classes of torch DCP's metadata: what is taken of them, and nothing else.

Source: ``torch.distributed.checkpoint.metadata`` and ``.filesystem`` of torch 2.0 to 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp_core.torch_files import Buildable, Global, extents_of

if TYPE_CHECKING:
    from collections.abc import Callable


class Metadata(Buildable):
    """All of the file."""

    __slots__ = ("state",)

    def build(self, state: Any) -> None:
        """Take what counts of a pickled object's state."""
        self.state = mapping(state)


class TensorMetadata(Buildable):
    """A tensor: dtype, shape and chunks."""

    __slots__ = ("chunks", "dtype", "shape")

    def build(self, state: Any) -> None:
        """Take what counts of a pickled object's state."""
        fields = mapping(state)
        self.shape = extents_of(fields["size"])
        self.chunks = expect(fields["chunks"], list)
        self.dtype = expect(fields["properties"], Properties).dtype


class Properties(Buildable):
    """What is taken of a tensor's properties: the dtype."""

    __slots__ = ("dtype",)

    def build(self, state: Any) -> None:
        """Take what counts of a pickled object's state."""
        dtype = state["dtype"] if isinstance(state, dict) else state[0]
        self.dtype: str = expect(dtype, Global).name.removeprefix("torch.")


class ChunkMetadata(Buildable):
    """A box of a tensor."""

    __slots__ = ("offsets", "sizes")

    def build(self, state: Any) -> None:
        """Take what counts of a pickled object's state."""
        fields = mapping(state)
        self.offsets = extents_of(fields["offsets"])
        self.sizes = extents_of(fields["sizes"])


class BytesMetadata(Buildable):
    """A value that is no tensor; nothing is said of it."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        """Take what counts of a pickled object's state."""
        del state


class Index(Buildable):
    """Which chunk of which key an entry of the storage is of."""

    __slots__ = ("key", "offset")

    def build(self, state: Any) -> None:
        """Take what counts of a pickled object's state."""
        fields = mapping(state)
        self.key = expect(fields["fqn"], str)
        offset = fields.get("offset")
        self.offset = None if offset is None else extents_of(offset)


class StorageInfo(Buildable):
    """Where a chunk lies."""

    __slots__ = ("length", "offset", "path", "transforms")

    def build(self, state: Any) -> None:
        """Take what counts of a pickled object's state."""
        fields = mapping(state)
        self.path = expect(fields["relative_path"], str)
        self.offset, self.length = extents_of((fields["offset"], fields["length"]))
        self.transforms = fields.get("transform_descriptors")


def expect(value: Any, kind: type[Any]) -> Any:
    """Return the value if it is of exactly this kind.

    Raises:
        TypeError: It is not.
    """
    if type(value) is not kind:
        msg = f"a {type(value).__name__} where {kind.__name__.strip('_')} is expected"
        raise TypeError(msg)
    return value


def mapping(value: Any) -> dict[Any, Any]:
    """Return the value if it is a dict.

    Raises:
        TypeError: It is not.
    """
    found: dict[Any, Any] = expect(value, dict)
    return found


_MODULE = "torch.distributed.checkpoint"
CLASSES: dict[str, Callable[..., Any]] = {
    f"{_MODULE}.metadata.Metadata": Metadata,
    f"{_MODULE}.metadata.TensorStorageMetadata": TensorMetadata,
    f"{_MODULE}.metadata.TensorProperties": Properties,
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": Properties,
    f"{_MODULE}.metadata.ChunkStorageMetadata": ChunkMetadata,
    f"{_MODULE}.metadata.BytesStorageMetadata": BytesMetadata,
    f"{_MODULE}.metadata.MetadataIndex": Index,
    f"{_MODULE}.filesystem._StorageInfo": StorageInfo,
}
