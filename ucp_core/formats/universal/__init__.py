"""The universal checkpoint: whole tensors in safetensors files."""

from ucp_core.formats.universal.files import (
    INDEX_NAME,
    TargetFile,
    extra_file,
    small_files,
    target_files,
)

__all__ = [
    "INDEX_NAME",
    "TargetFile",
    "extra_file",
    "small_files",
    "target_files",
]
