"""The meaning of rules, and the limits of a text of rules."""

import re
from pathlib import Path

import pytest

from ucp_core.commands.console import read_rules
from ucp_core.errors import RulesError
from ucp_core.language import (
    Affine,
    Cut,
    Grid,
    Pattern,
    Replicated,
    Rules,
    Unique,
    builtin_names,
    builtin_rules,
    load_renames,
    load_rules,
)
from ucp_core.language.rules import Rule

AFFINE = """\
affine:
      logical_shape: [4]
      ranks: {0: {shard_shape: [4], pieces: [{shape: [4], source: [0, [1]], dest: [0, [1]],
        locations: [0]}]}}"""


def _rule(pattern: str) -> Rules:
    return load_rules(f"rules:\n- match: w\n  pattern: {pattern}\n", "r.yaml")


def test_an_affine_map_can_be_written() -> None:
    """Layouts that no other pattern describes."""
    pattern = _rule(f"\n    {AFFINE}").match("w")

    assert isinstance(pattern, Affine)
    assert pattern.shards == ((4,),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "r:1:1: is empty"),
        ("# nothing\n", "r:1:1: is empty"),
        ("- 1", "r:1:1: must be an object, not [1]"),
        ("a: [", "r:1:5: is not YAML"),
        ("\x00", "r:1:1: is not YAML"),
        ("[" * 4_000, "r:1:1: is not YAML"),
        ("rules: &a [*a]", "r:1:1: is not YAML"),
        ("rules: []", "r:1:1: rules: is an empty list"),
        ("{rules: [{match: a}]}", "r:1:10: rules.0.pattern: is missing"),
        ("rule: []", "r:1:1: rule: is not a key here; did you mean rules?"),
        ("? [1]\n: 2", "r:1:3: a key must be a word"),
        ("version: 2", "r:1:1: version: is 2, this program reads 1"),
        ("version: one", "r:1:1: version: must be a valid integer, not 'one'"),
        ("first_wins: 1", "r:1:1: first_wins: must be a valid boolean, not 1"),
        ("extends: [lama]", "r:1:11: extends.0: unknown family 'lama': did you mean llama?"),
        ("extends: llama", "r:1:1: extends: must be a valid array, not 'llama'"),
        ("ties: {a: 1}", "r:1:8: ties.a: must be a valid string, not 1; put it in quotes"),
        ("ties: {a: b, a: c}", "r:1:14: ties.a: is written twice; keep one of them"),
        (f"ties: {{a: {'b' * (1 << 20)}}}", "r:1:1: has 1048587 characters"),
    ],
)
def test_wrong_texts_are_told_by_line_and_column(text: str, problem: str) -> None:
    """A rule that is quietly left out converts a checkpoint wrongly."""
    with pytest.raises(RulesError, match=re.escape(problem)) as caught:
        load_rules(text, "r")

    assert caught.value.facts["line"] >= 1
    assert caught.value.facts["column"] >= 1


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("uniqe", "3:3: rules.0.pattern.uniqe: is not a key here; did you mean unique?"),
        ("{unique: {a: 1}}", "3:22: rules.0.pattern.unique.a: is not a key here; known here: none"),
        ("[unique]", "3:3: rules.0.pattern: must be an object, not ['unique']"),
        ("{cut: 0, unique: {}}", "3:3: rules.0.pattern: must be one of unique, replicated"),
        ("cut", "3:3: rules.0.pattern.cut.dim: is missing"),
        ("{cut: x}", "3:13: rules.0.pattern.cut.dim: must be a valid integer, not 'x'"),
        ("{cut: {parts: 2}}", "3:13: rules.0.pattern.cut.dim: is missing"),
        ("{cut: {dim: true}}", "3:19: rules.0.pattern.cut.dim: must be a valid integer, not True"),
        ("{cut: {dim: 0, part: 2}}", "cut.part: is not a key here; did you mean parts?"),
        ("{cut: {dim: 0, parts: [4, -1]}}", "rules.0.pattern: parts and ratio must be at least 1"),
        (
            "{cut: {dim: 0, parts: 2, ratio: [1, 1]}}",
            "rules.0.pattern: parts and ratio exclude each other",
        ),
        (
            "{cut: {dim: 0, part_widths: [[1, 2], [3]]}}",
            "rules.0.pattern: part_widths must have the same number of ranks for every part",
        ),
        (
            "{cut: {dim: 0, parts: [4], part_widths: [[1, 2]]}}",
            "rules.0.pattern: part_widths add up to [3], parts says [4]",
        ),
        (
            "{replicated: {check: mostly}}",
            "3:26: rules.0.pattern.replicated.check: must be 'equal' or 'first', not 'mostly'",
        ),
        ("grid", "3:3: rules.0.pattern.grid.cuts: is missing"),
        ("{grid: {cuts: [0, 1]}}", "rules.0.pattern.grid.degrees: is missing"),
        (
            "{grid: {cuts: [0, 0], degrees: [2, 2]}}",
            "rules.0.pattern: two cuts of a grid along one dim",
        ),
        ("{affine: {ranks: 3}}", "3:13: rules.0.pattern.affine: not an affine map of version 1"),
    ],
)
def test_wrong_patterns_are_told_by_line_and_column(pattern: str, problem: str) -> None:
    """Numbers that contradict each other are seen before any checkpoint is."""
    with pytest.raises(RulesError, match=re.escape(problem)):
        _rule(pattern)


def test_all_problems_come_at_once() -> None:
    """One run a problem is a slow way to write a file."""
    text = "rules:\n- {match: '(', pattern: unique}\n- {match: a}\n- {pattern: nique}\n"

    with pytest.raises(RulesError) as caught:
        load_rules(text, "my.yaml")

    assert [p.place for p in caught.value.facts["problems"]] == [
        ("my.yaml", 2, 4),
        ("my.yaml", 3, 3),
        ("my.yaml", 4, 3),
        ("my.yaml", 4, 4),
    ]
    assert "my.yaml:2:4: rules.0.match.0: is not a regular expression" in str(caught.value)


def test_one_name_cannot_be_matched_twice_by_the_same_words() -> None:
    """The second of two equal rules never counts, so somebody meant another."""
    text = "rules:\n- {match: [a, b], pattern: unique}\n- {match: b, pattern: average}\n"

    with pytest.raises(
        RulesError, match=r"r:3:4: rules.1.match: 'b' is matched by the rule at line 2 already"
    ):
        load_rules(text, "r")


def test_rules_that_contradict_each_other_name_both() -> None:
    """Whichever came first would be a guess."""
    text = "rules:\n- {match: 'a.*', pattern: unique}\n- {match: '.*b', pattern: average}\n"
    rules = load_rules(text, "r.yaml")

    assert rules.match("ax") == Unique()
    with pytest.raises(RulesError, match=r"ab: 'a\.\*' \(r.yaml:2\) and '\.\*b' \(r.yaml:3\)"):
        rules.match("ab")
    assert load_rules(f"first_wins: true\n{text}", "r").match("ab") == Unique()


def test_a_rule_for_a_slot_goes_before_those_for_all() -> None:
    """Adafactor's factored slots have other shapes than the weight, so other patterns."""
    rules = Rules((Rule("w", Cut(0)), Rule("w", Replicated(), slot="exp_avg_sq_col")))

    assert rules.match("w", "exp_avg_sq_col") == Replicated()
    assert rules.match("w", "weight") == Cut(0)
    assert rules.match("w") == Cut(0)


def test_own_rules_go_before_those_that_ship() -> None:
    """The user knows the model."""
    text = "extends: [llama]\nrules:\n- {match: 'lm_head.weight', pattern: replicated}\n"
    rules = load_rules(text, "r.yaml")

    assert rules.match("lm_head.weight") == Replicated()
    assert rules.match("model.layers.3.self_attn.o_proj.weight") == Cut(1)
    assert rules.match("model.layers.3.unheard.of") is None


NAMES: dict[str, dict[str, Pattern | None]] = {
    "llama": {
        "model.embed_tokens.weight": Cut(0),
        "model.layers.11.self_attn.q_proj.bias": Cut(0),
        "model.layers.11.self_attn.o_proj.weight": Cut(1),
        "model.layers.11.mlp.gate_proj.weight": Cut(0),
        "model.layers.11.mlp.down_proj.weight": Cut(1),
        "model.layers.11.input_layernorm.weight": Replicated(),
        "model.norm.weight": Replicated(),
        "lm_head.weight": Cut(0),
    },
    "mixtral": {
        "model.layers.0.block_sparse_moe.experts.7.w2.weight": Cut(1),
        "model.layers.0.block_sparse_moe.gate.weight": Replicated(),
        "model.layers.0.mlp.experts.gate_up_proj": Cut(1, ratio=(1, 1)),
        "model.layers.0.self_attn.k_proj.weight": Cut(0),
    },
    "deepseek": {
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": Replicated(),
        "model.layers.3.self_attn.kv_b_proj.weight": Cut(0),
        "model.layers.3.mlp.shared_experts.down_proj.weight": Cut(1),
        "model.layers.3.mlp.experts.255.up_proj.weight": Cut(0),
        "model.layers.3.mlp.gate.e_score_correction_bias": Replicated(),
    },
    "gpt2": {
        "transformer.h.0.attn.c_attn.weight": Cut(-1, ratio=(1, 1, 1)),
        "h.0.attn.c_proj.weight": Cut(0),
        "transformer.h.0.mlp.c_proj.bias": Replicated(),
        "transformer.wpe.weight": Replicated(),
    },
    "gpt-neox": {
        "gpt_neox.layers.0.attention.query_key_value.weight": Cut(0),
        "gpt_neox.layers.0.mlp.dense_4h_to_h.weight": Cut(1),
        "gpt_neox.final_layer_norm.bias": Replicated(),
        "embed_out.weight": Cut(0),
    },
    "bloom": {
        "transformer.word_embeddings_layernorm.bias": Replicated(),
        "transformer.h.69.self_attention.query_key_value.bias": Cut(0),
        "transformer.h.69.self_attention.dense.bias": Replicated(),
    },
    "megatron": {
        "language_model.embedding.word_embeddings.weight": Cut(0),
        "language_model.encoder.layers.0.self_attention.dense.weight": Cut(1),
        "language_model.encoder.layers.0.mlp.dense_h_to_4h.bias": Cut(0),
        "language_model.encoder.final_layernorm.weight": Replicated(),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": Replicated(),
        "decoder.layers.0.self_attention.linear_qkv.weight": Cut(0),
        "decoder.layers.0.self_attention.q_layernorm.weight": Replicated(),
        "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight": Cut(1),
        "decoder.layers.0.mlp.experts.linear_fc1.weight12": Cut(0),
        "decoder.layers.0.mlp.experts.experts.linear_fc1.weight": Cut(1),
        "decoder.layers.0.mlp.experts.experts.linear_fc2.weight": Cut(2),
        "decoder.layers.0.mlp.experts.linear_fc1.weight": None,
        "output_layer.weight": Cut(0),
    },
    "megatron-gated": {
        "decoder.layers.0.mlp.linear_fc1.weight": Cut(0, ratio=(1, 1)),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": Replicated(),
        "decoder.layers.0.mlp.experts.linear_fc1.weight12": Cut(0, ratio=(1, 1)),
        "decoder.layers.0.mlp.experts.experts.linear_fc1.weight": Cut(1, ratio=(1, 1)),
        "decoder.layers.0.mlp.experts.experts.linear_fc2.weight": Cut(2),
        "decoder.layers.0.mlp.linear_fc2.weight": Cut(1),
    },
    "megatron-deepspeed": {
        "tied_modules.embed.word_embeddings.weight": Cut(0),
        "3.self_attention.query_key_value.weight": None,
        "3.self_attention.dense.weight": Cut(1),
        "3.input_layernorm.weight": Replicated(),
        "27.weight": Replicated(),
        "28.lm_head.weight": Cut(0),
    },
    "megatron-deepspeed-by-head": {"3.self_attention.query_key_value.weight": Cut(0)},
    "megatron-deepspeed-blocks": {
        "3.self_attention.query_key_value.weight": Cut(0, ratio=(1, 1, 1))
    },
    "torchtitan": {"layers.3.attention.wo.weight": Cut(1), "norm.weight": Replicated()},
    "everstep": {"layers.3.attention.out.weight": Cut(1), "layers.3.ffn_norm.weight": Replicated()},
    "fsdp": {"anything": Cut(0)},
    "replicated": {"anything": Replicated()},
}


@pytest.mark.parametrize("family", builtin_names())
def test_families_know_the_names_of_their_models(family: str) -> None:
    """Also that no two rules of a family contradict each other on these names."""
    rules = builtin_rules(family)

    found = {fqn: rules.match(fqn) for fqn in NAMES[family]}

    assert found == NAMES[family]


def test_the_page_lists_every_family() -> None:
    """A family that users cannot find does not exist."""
    page = (Path(__file__).parents[4] / "ucp_core" / "RULES.md").read_text(encoding="utf-8")

    assert [name for name in builtin_names() if f"`{name}`" not in page] == []


def test_the_patterns_of_the_page_can_be_read() -> None:
    """Examples are what people copy."""
    page = (Path(__file__).parents[4] / "ucp_core" / "RULES.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.*?)`(?:, `.*?`)? \|.*\|.*\|$", page, re.MULTILINE)
    patterns = [row for row in rows if row.split(":")[0].strip("{") in {"cut", "grid"}]

    assert len(patterns) > 8
    for text in patterns:
        assert isinstance(_rule(text).match("w"), Cut | Grid)
    for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        (load_renames if block.startswith("- {") else load_rules)(block, "RULES.md")


def test_an_unknown_family_names_those_that_there_are() -> None:
    """A typo on the command line."""
    with pytest.raises(RulesError, match="no built-in rules 'lama'; there are bloom, "):
        builtin_rules("lama")


def test_renames_rewrite_names_by_their_groups() -> None:
    """The first that matches counts, and what does not change is not listed."""
    renames = load_renames(
        "- {match: 'h\\.(\\d+)\\.w', to: 'layers.\\1.weight'}\n- {match: '.*', to: '\\g<0>'}", "r"
    )

    assert renames.mapping(["h.3.w", "other"]) == {"h.3.w": "layers.3.weight"}
    for text, problem in {
        "": "r:1:1: is empty",
        "- {match: a}": "r:1:3: 0.to: is missing",
        "- {match: a, to: b, optional: 1}": "r:1:21: 0.optional: must be a valid boolean, not 1",
        "- {match: a, to: '\\1'}": "r:1:14: 0.to: '\\\\1' does not fit 'a': invalid group",
    }.items():
        with pytest.raises(RulesError, match=re.escape(problem)):
            load_renames(text, "r")


def test_a_command_takes_a_family_for_a_file() -> None:
    """The error for a tensor of unknown layout asks for the rules of its family."""
    assert read_rules("llama") is builtin_rules("llama")
    assert read_rules(None) is None


def test_a_renaming_that_matches_nothing_is_refused_unless_it_may() -> None:
    """A typing error would silently leave a tensor under its old name."""
    renames = load_renames(
        "- {match: 'h\\.(\\d+)\\.w', to: 'layers.\\1.weight'}\n"
        "- {match: 'head', to: 'out', optional: true}\n"
        "- {match: 'h\\.(\\d+)\\.wieght', to: 'x'}",
        "names.yaml",
    )

    with pytest.raises(RulesError, match=r"^names\.yaml:3: 'h.*wieght' matches none of the 2 n"):
        renames.refuse_idle(["h.3.w", "other"])
    renames.refuse_idle(["h.3.w", "h.3.wieght"])
