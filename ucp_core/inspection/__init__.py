"""Compare (``diff``), verify (``verify``) and extract from checkpoints of any format."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.inspection.comparison import DiffReport, TensorDiff, diff, json_value
    from ucp_core.inspection.elements import Tolerance, compare
    from ucp_core.inspection.extraction import extract, find, parse_box
    from ucp_core.inspection.verification import unchecked_bytes, verify


__getattr__ = lazy_door(__name__)
