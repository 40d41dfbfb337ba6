"""How the shards of several ranks form tensors: the language that ``RULES.md`` describes. Pure.

``patterns`` defines the values of the language, ``affine`` strided pieces, ``syntax`` its text.
``rules`` maps tensors to patterns, ``operators`` turns patterns into fragments, and ``targets``
says which boxes a rank needs.
"""

from ucp_core.language.affine import Affine, parse_affine_map
from ucp_core.language.operators import extract, rename, strip_padding, tie, union
from ucp_core.language.patterns import (
    Average,
    Cut,
    Grid,
    Pattern,
    Placement,
    Replicated,
    ShardPiece,
    Unique,
    place,
    plain,
    split,
)
from ucp_core.language.rule_texts import (
    builtin_names,
    builtin_rules,
    family_of,
    load_renames,
    load_rules,
)
from ucp_core.language.rules import Rules
from ucp_core.language.targets import shapes_of, target_map
