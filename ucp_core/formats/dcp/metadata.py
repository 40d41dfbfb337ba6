"""Stand-ins for the classes of torch DCP's metadata, with the attributes that are needed.

Source: ``torch.distributed.checkpoint.metadata`` and ``.filesystem`` of torch 2.0 to 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp_core.torch_files import Buildable, Global, extents_of

if TYPE_CHECKING:
    from collections.abc import Callable


class Metadata(Buildable):
    """The whole file."""

    __slots__ = ("state",)

    def build(self, state: Any) -> None:
        """Take the needed attributes from the pickled state."""
        self.state = mapping(state)


class TensorMetadata(Buildable):
    """A tensor: dtype, shape and chunks."""

    __slots__ = ("chunks", "dtype", "shape")

    def build(self, state: Any) -> None:
        """Take the needed attributes from the pickled state."""
        fields = mapping(state)
        self.shape = extents_of(fields["size"])
        self.chunks = expect(fields["chunks"], list)
        self.dtype = expect(fields["properties"], Properties).dtype


class Properties(Buildable):
    """A tensor's properties, of which only the dtype is needed."""

    __slots__ = ("dtype",)

    def build(self, state: Any) -> None:
        """Take the needed attributes from the pickled state."""
        dtype = state["dtype"] if isinstance(state, dict) else state[0]
        self.dtype: str = expect(dtype, Global).name.removeprefix("torch.")


class ChunkMetadata(Buildable):
    """A box of a tensor."""

    __slots__ = ("offsets", "sizes")

    def build(self, state: Any) -> None:
        """Take the needed attributes from the pickled state."""
        fields = mapping(state)
        self.offsets = extents_of(fields["offsets"])
        self.sizes = extents_of(fields["sizes"])


class BytesMetadata(Buildable):
    """A value that is no tensor; it has no attributes."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        """Take the needed attributes from the pickled state."""
        del state


class Index(Buildable):
    """The key and the chunk of an entry in the storage."""

    __slots__ = ("key", "offset")

    def build(self, state: Any) -> None:
        """Take the needed attributes from the pickled state."""
        fields = mapping(state)
        self.key = expect(fields["fqn"], str)
        offset = fields.get("offset")
        self.offset = None if offset is None else extents_of(offset)


class StorageInfo(Buildable):
    """Where a chunk is."""

    __slots__ = ("length", "offset", "path", "transforms")

    def build(self, state: Any) -> None:
        """Take the needed attributes from the pickled state."""
        fields = mapping(state)
        self.path = expect(fields["relative_path"], str)
        self.offset, self.length = extents_of((fields["offset"], fields["length"]))
        self.transforms = fields.get("transform_descriptors")


def expect(value: Any, kind: type[Any]) -> Any:
    """Return the value if it is exactly of this type, else raise ``TypeError``."""
    if type(value) is not kind:
        msg = f"a {type(value).__name__} where {kind.__name__.strip('_')} is expected"
        raise TypeError(msg)
    return value


def mapping(value: Any) -> dict[Any, Any]:
    """Return the value if it is a dict, else raise ``TypeError``."""
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
