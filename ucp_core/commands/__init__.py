"""The commands of ``ucp``; ``ucp_core.cli`` puts them together.

``convert`` and ``plan`` are in ``convert``; ``inspect`` and ``verify`` in ``inspect``; ``diff``,
``export`` and ``extract`` in ``tools``; what they share in ``console``.
"""

from ucp_core.commands import convert, inspect, tools
from ucp_core.commands.console import EXIT_CHECKPOINT, EXIT_STORAGE, memory_size, open_any, progress

__all__ = [
    "EXIT_CHECKPOINT",
    "EXIT_STORAGE",
    "convert",
    "inspect",
    "memory_size",
    "open_any",
    "progress",
    "tools",
]
