"""Looks at checkpoints of any format and changes nothing.

``diff`` compares two (``elements``: their numbers beside each other), ``extract`` looks at one
tensor, ``verification`` reads every byte of one (``foreign``: of a format that is not ours).
"""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.inspection.comparison import DiffReport, TensorDiff, Tolerance, diff, plain
    from ucp_core.inspection.extraction import extract, find, parse_box
    from ucp_core.inspection.verification import unchecked_bytes, verify

__all__ = [
    "DiffReport",
    "TensorDiff",
    "Tolerance",
    "diff",
    "extract",
    "find",
    "parse_box",
    "plain",
    "unchecked_bytes",
    "verify",
]

__getattr__ = lazy_door(
    __name__,
    {
        "ucp_core.inspection.comparison": (
            "DiffReport",
            "TensorDiff",
            "Tolerance",
            "diff",
            "plain",
        ),
        "ucp_core.inspection.extraction": ("extract", "find", "parse_box"),
        "ucp_core.inspection.verification": ("unchecked_bytes", "verify"),
    },
)
