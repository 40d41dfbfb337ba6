"""The commands of ``ucp``; ``ucp_core.cli`` runs them.

``convert`` is in ``convert``; ``inspect`` and ``verify`` in ``inspect``; ``diff``,
``export`` and ``extract`` in ``tools``; what they share in ``console``.
"""

# Importing a module adds its commands to ``app``.
import ucp_core.commands.inspect
import ucp_core.commands.tools
from ucp_core.commands.console import (
    EXIT_CHECKPOINT,
    EXIT_STORAGE,
    app,
    memory_size,
    open_any,
    progress,
)
from ucp_core.commands.convert import conversion_facts
