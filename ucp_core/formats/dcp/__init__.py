"""Checkpoints of torch's distributed checkpoint (DCP): ``reader`` and ``writer``.

A directory (``directory``) has metadata (``metadata``) and data files, together a container
(``container``), which Megatron-core uses too; in some, tensors lie as safetensors
(``safetensors``). ``key_names`` says what its keys mean, ``state`` makes training state of it.
"""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.formats.dcp.container import Container
    from ucp_core.formats.dcp.directory import read_container
    from ucp_core.formats.dcp.recognition import metadata_names
    from ucp_core.formats.dcp.writer import Contents, DcpFiles, Place, Rows, hyper


__getattr__ = lazy_door(__name__)
