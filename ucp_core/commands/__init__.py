"""The commands of ``ucp``; ``ucp_core.cli`` puts them together.

``inspect`` and ``verify`` are in ``ucp_core.cli``; ``convert`` and ``plan`` in ``convert``;
``diff``, ``export`` and ``extract`` in ``tools``; options, progress and output in ``console``.
"""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.commands import convert, tools
    from ucp_core.commands.console import (
        EXIT_CHECKPOINT,
        EXIT_STORAGE,
        Json,
        RenameFile,
        RulesFile,
        Source,
        Tag,
        memory_size,
        open_any,
        print_facts,
        print_json,
        progress,
    )

__all__ = [
    "EXIT_CHECKPOINT",
    "EXIT_STORAGE",
    "Json",
    "RenameFile",
    "RulesFile",
    "Source",
    "Tag",
    "convert",
    "memory_size",
    "open_any",
    "print_facts",
    "print_json",
    "progress",
    "tools",
]

__getattr__ = lazy_door(
    __name__,
    {
        "ucp_core.commands": ("convert", "tools"),
        "ucp_core.commands.console": (
            "EXIT_CHECKPOINT",
            "EXIT_STORAGE",
            "Json",
            "RenameFile",
            "RulesFile",
            "Source",
            "Tag",
            "memory_size",
            "open_any",
            "print_facts",
            "print_json",
            "progress",
        ),
    },
)
