"""Checkpoints of other frameworks, opened as any other: recognised, described, never copied."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.formats.exporting import (
        FORMATS,
        export,
        exported,
        left_behind,
        lies_beside,
        options_of,
        refuse_inside,
        warnings_of,
    )
    from ucp_core.formats.opening import open_source, recognise
    from ucp_core.formats.safetensors_header import print_header
    from ucp_core.formats.universal import (
        INDEX_NAME,
        TargetFile,
        extra_file,
        small_files,
        target_files,
    )

__all__ = [
    "FORMATS",
    "INDEX_NAME",
    "TargetFile",
    "export",
    "exported",
    "extra_file",
    "left_behind",
    "lies_beside",
    "open_source",
    "options_of",
    "print_header",
    "recognise",
    "refuse_inside",
    "small_files",
    "target_files",
    "warnings_of",
]

__getattr__ = lazy_door(__name__)
