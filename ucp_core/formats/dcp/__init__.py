"""Checkpoints of torch's distributed checkpoint (DCP): ``reader`` and ``writer``.

``directory`` reads the metadata of a directory, and ``container`` its metadata and data files as
one container, which Megatron-core uses too. ``key_names`` says what the keys mean.
"""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.formats.dcp.container import Container
    from ucp_core.formats.dcp.directory import read_container
    from ucp_core.formats.dcp.recognition import metadata_names
    from ucp_core.formats.dcp.writer import Contents, DcpFiles, Part, Rows, hyper


__getattr__ = lazy_door(__name__)
