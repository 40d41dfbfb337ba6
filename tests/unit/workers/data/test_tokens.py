from pathlib import Path
from typing import Any

import pytest

from workers.data.tokens import BYTE_END, byte_tokenizer, open_tokenizer
from workers.errors import DataError
from workers.models import BYTE_VOCAB_SIZE


def trained(directory: Path, *, end: str) -> str:
    tokenizers: Any = pytest.importorskip("tokenizers", reason="needs the extra hf")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[end])
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 9, trainer)
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_bytes_are_their_own_tokens() -> None:
    """Any file can be read so, whatever its encoding, and no document holds the end token."""
    tokenizer = byte_tokenizer()

    assert tokenizer.encode(bytes(range(256))).tolist() == list(range(256))
    assert tokenizer.end == BYTE_END < tokenizer.vocab_size == BYTE_VOCAB_SIZE


def test_a_tokenizer_file_gives_fewer_tokens_than_bytes(tmp_path: Path) -> None:
    """Its own end-of-document token has to be found by name; files differ in what they call it."""
    tokenizer = open_tokenizer(trained(tmp_path, end="<|endoftext|>"))

    tokens = tokenizer.encode(b"the lazy fox")

    assert 0 < len(tokens) < 12
    assert max(tokens.tolist()) < tokenizer.vocab_size
    assert tokenizer.end < tokenizer.vocab_size
    assert tokenizer.end not in tokens


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    """Documents would run into each other unmarked."""
    path = trained(tmp_path, end="[STOP]")

    with pytest.raises(DataError, match="no token that ends a document"):
        open_tokenizer(path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    """The package that reads it says where in the text it failed, but not in which file."""
    pytest.importorskip("tokenizers", reason="needs the extra hf")
    (tmp_path / "tokenizer.json").write_text("{")

    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
