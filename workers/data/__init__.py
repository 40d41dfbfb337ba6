"""From text to samples, and the order of samples. ``order`` imports no torch."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.data.dataset import Split, open_texts
    from workers.data.order import DataOrder
    from workers.data.text import find_source

__all__ = [
    "DataOrder",
    "Split",
    "find_source",
    "open_texts",
]

__getattr__ = lazy_door(__name__)
