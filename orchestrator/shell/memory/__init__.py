"""The controller's side of the snapshots in keepers' memory."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.shell.memory.orders import Orders
    from orchestrator.shell.memory.redundancy_status import ProtectionWatch, loss_document
    from orchestrator.shell.memory.save_costs import CadenceWatch
    from orchestrator.shell.memory.snapshots import Snapshots


__getattr__ = lazy_door(__name__)
