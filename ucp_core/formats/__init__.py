"""Recognises and opens checkpoints of other frameworks, without copying them."""

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


__getattr__ = lazy_door(__name__)
