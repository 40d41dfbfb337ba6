"""How the shards of several ranks form tensors: the language that ``RULES.md`` describes. Pure.

``patterns`` defines the values of the language, ``affine`` strided pieces, ``syntax`` its text.
``rules`` maps tensors to patterns, and ``operators`` turns patterns into fragments.
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
    load_renames,
    load_rules,
)
from ucp_core.language.rules import Rules
