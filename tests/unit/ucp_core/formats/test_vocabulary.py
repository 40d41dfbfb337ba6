"""Megatron's arguments tell how many rows of a vocabulary are tokens, or nothing is stripped."""

from typing import Any

import pytest

from ucp_core.formats.shared.vocabulary import vocabulary_of

EMBEDDING = "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("told", "num_tokens"),
    [
        ({"vocab_size": 121}, 121),
        ({"vocab_size": 121, "make_vocab_size_divisible_by": 64}, 121),
        # The tokenizer padded another size to 128: 121 would have become 122.
        ({"vocab_size": 121, "make_vocab_size_divisible_by": 2}, None),
        ({"vocab_size": 129}, None),
        ({"vocab_size": None}, None),
        # Until core 0.17 it counted the end of documents besides the size it was given.
        ({"vocab_size": 121, "tokenizer_type": "NullTokenizer"}, 122),
        (
            {"vocab_size": 121, "tokenizer_type": "NullTokenizer", "null_tokenizer_eod_id": None},
            121,
        ),
        ({"vocab_size": 121, "tokenizer_type": "NullMultimodalTokenizer"}, 122),
        ({"vocab_size": 128, "make_vocab_size_divisible_by": 64}, 128),
    ],
)
def test_only_a_size_that_makes_the_rows_is_believed(
    told: dict[str, Any], num_tokens: int | None
) -> None:
    """A row too few is a token that is lost, without any error to come."""
    vocabulary = vocabulary_of({"padded_vocab_size": 128, **told})

    assert vocabulary.extent(EMBEDDING, 128) == num_tokens
    assert vocabulary.extent(EMBEDDING, 256) is None
    assert vocabulary.extent("decoder.layers.0.mlp.linear_fc1.weight", 128) is None
