"""The commands of ``ucp``; ``ucp_core.cli`` runs them.

``convert`` and ``plan`` are in ``convert``; ``inspect`` and ``verify`` in ``inspect``; ``diff``,
``export`` and ``extract`` in ``tools``; what they share in ``console``.
"""

# Importing a module adds its commands to ``app``.
from ucp_core.commands import inspect, tools  # noqa: F401
from ucp_core.commands.console import (
    EXIT_CHECKPOINT,
    EXIT_STORAGE,
    app,
    memory_size,
    open_any,
    progress,
)
from ucp_core.commands.convert import conversion_facts

__all__ = [
    "EXIT_CHECKPOINT",
    "EXIT_STORAGE",
    "app",
    "conversion_facts",
    "memory_size",
    "open_any",
    "progress",
]
