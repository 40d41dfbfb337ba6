"""Finds the place of Hugging Face's tensors in the parameters of Megatron-core. Pure.

It knows the names of Llama, and of models with experts and the attention of Llama or DeepSeek.
Megatron has q, k and v in one parameter, the rows of one query group after the other, and gate and
up in another. The elements are equal, because both rotate the first half of a head with the second.
In ``transformers`` 5 the experts of a layer are also one tensor, of the same shape. Source:
``Attention.get_query_key_value_tensors``, ``MLP``, ``MLASelfAttention``, ``TopKRouter`` and
``SequentialMLP.sharded_state_dict`` of Megatron-core 0.16.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ucp_core.errors import UcpError
from ucp_core.formats.dcp import Rows
from ucp_core.formats.shared import stacked_experts

#: Names of Hugging Face, and of Megatron, outside of layers and in a layer.
_OUTER = {
    r"(?:model\.)?embed_tokens\.weight": "embedding.word_embeddings.weight",
    r"(?:model\.)?norm\.weight": "decoder.final_layernorm.weight",
    r"lm_head\.weight": "output_layer.weight",
}
_IN_LAYER = {
    r"input_layernorm\.weight": "input_layernorm.weight",
    r"post_attention_layernorm\.weight": "pre_mlp_layernorm.weight",
    r"self_attn\.(?P<part>[qkv])_proj\.(?P<kind>weight|bias)": "self_attention.linear_qkv.{kind}",
    r"self_attn\.o_proj\.weight": "self_attention.linear_proj.weight",
    r"self_attn\.(?P<one>[qk])_norm\.weight": "self_attention.{one}_layernorm.weight",
    r"self_attn\.(?P<one>q|kv)_a_proj(_with_mqa)?\.weight": (
        "self_attention.linear_{one}_down_proj.weight"
    ),
    r"self_attn\.(?P<one>q|kv)_a_layernorm\.weight": "self_attention.{one}_layernorm.weight",
    r"self_attn\.(?P<one>q|kv)_b_proj\.weight": "self_attention.linear_{one}_up_proj.weight",
    r"mlp\.(?P<part>gate|up)_proj\.weight": "mlp.linear_fc1.weight",
    r"mlp\.down_proj\.weight": "mlp.linear_fc2.weight",
    r"mlp\.experts\.gate_up_proj": "mlp.experts.experts.linear_fc1.weight",
    r"mlp\.experts\.down_proj": "mlp.experts.experts.linear_fc2.weight",
    r"mlp\.gate\.weight": "mlp.router.weight",
    r"mlp\.gate\.e_score_correction_bias": "mlp.router.expert_bias",
    r"mlp\.shared_experts\.(?P<part>gate|up)_proj\.weight": "mlp.shared_experts.linear_fc1.weight",
    r"mlp\.shared_experts\.down_proj\.weight": "mlp.shared_experts.linear_fc2.weight",
}
_NAMES = [(re.compile(theirs), ours) for theirs, ours in _OUTER.items()] + [
    (
        re.compile(rf"(?:model\.)?layers\.(?P<layer>\d+)\.{theirs}"),
        f"decoder.layers.{{layer}}.{ours}",
    )
    for theirs, ours in _IN_LAYER.items()
]
_PARTS = (("q", "k", "v"), ("gate", "up"))


class Joined(NamedTuple):
    """Megatron's parameter that holds a tensor, its shape, and the tensor's rows in it.

    None means all rows.
    """

    fqn: str
    shape: tuple[int, ...]
    rows: Rows | None


def joined(shapes: Mapping[str, tuple[int, ...]], query_groups: int | None) -> dict[str, Joined]:
    """Return the place of each tensor; a tensor without a known name is a whole parameter.

    Args:
        query_groups: Number of heads of k and v.
    """
    stacked_experts(shapes)
    found: dict[str, Joined] = {}
    parts: dict[str, dict[str, str]] = {}
    for fqn, shape in shapes.items():
        found[fqn] = Joined(fqn, shape, None)
        for pattern, name in _NAMES:
            match = pattern.fullmatch(fqn)
            if match is None:
                continue
            target = name.format_map(match.groupdict())
            found[fqn] = Joined(target, shape, None)
            if match.groupdict().get("part"):
                parts.setdefault(target, {})[match["part"]] = fqn
    for target, names in parts.items():
        order = next(order for order in _PARTS if not names.keys().isdisjoint(order))
        missing = [part for part in order if part not in names]
        if missing:
            raise UcpError(f"{target} has no {', '.join(missing)} beside {min(names.values())}")
        groups = query_groups if "q" in order else 1
        if groups is None:
            raise UcpError(
                f"nothing gives the number of heads of {names['k']}: give query_groups "
                "(--query-groups)"
            )
        counts = [shapes[names[part]][0] for part in order]
        if groups < 1 or any(count % groups for count in counts):
            raise UcpError(
                f"query_groups={groups} does not divide the {counts[1]} rows of {names[order[1]]}"
            )
        shape = (sum(counts), *shapes[names[order[0]]][1:])
        sizes = [count // groups for count in counts]
        for index, part in enumerate(order):
            rows = Rows(sum(sizes[:index]), sizes[index], sum(sizes))
            found[names[part]] = Joined(target, shape, rows)
    return found
