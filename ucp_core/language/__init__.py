"""Parts of the language for how shards make up tensors, which ``RULES.md`` describes.

Its patterns are values of ``ucp_core.language.patterns``, its rules of
``ucp_core.language.rules``; here are the
arithmetic of strided pieces (``affine``), the text form (``syntax``) and its printing (``plain``).
Families that ship are in ``ucp_core/language/families``.
"""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.language.affine import Affine, parse_affine_map
    from ucp_core.language.operators import extract, rename, strip_padding, tie, union
    from ucp_core.language.patterns import (
        Average,
        Cut,
        Grid,
        Pattern,
        Piece,
        Placement,
        Replicated,
        Unique,
        place,
        plain,
        split,
    )
    from ucp_core.language.rules import (
        Rules,
        builtin_names,
        builtin_rules,
        family_of,
        load_renames,
        load_rules,
    )
    from ucp_core.language.targets import shapes_of, target_map

__all__ = [
    "Affine",
    "Average",
    "Cut",
    "Grid",
    "Pattern",
    "Piece",
    "Placement",
    "Replicated",
    "Rules",
    "Unique",
    "builtin_names",
    "builtin_rules",
    "extract",
    "family_of",
    "load_renames",
    "load_rules",
    "parse_affine_map",
    "place",
    "plain",
    "rename",
    "shapes_of",
    "split",
    "strip_padding",
    "target_map",
    "tie",
    "union",
]

__getattr__ = lazy_door(
    __name__,
    {
        "ucp_core.language.affine": ("Affine", "parse_affine_map"),
        "ucp_core.language.operators": ("extract", "rename", "strip_padding", "tie", "union"),
        "ucp_core.language.patterns": (
            "Average",
            "Cut",
            "Grid",
            "Pattern",
            "Piece",
            "Placement",
            "Replicated",
            "Unique",
            "place",
            "plain",
            "split",
        ),
        "ucp_core.language.rules": (
            "Rules",
            "builtin_names",
            "builtin_rules",
            "family_of",
            "load_renames",
            "load_rules",
        ),
        "ucp_core.language.targets": ("shapes_of", "target_map"),
    },
)
