"""Turns text into token ids: its bytes, or those of a given Hugging Face tokenizer file."""

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from workers.errors import DataError
from workers.models import BYTE_VOCAB_SIZE

#: Id after each document when text is read as bytes.
BYTE_END: Final = 256
#: Names that tokenizer files have for the end of a document, tried in this order.
END_OF_TEXT_NAMES: Final = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer."""

    name: str  #: Identifies the tokenizer; the same on every machine for the same file.
    vocab_size: int  #: Ids are below this.
    end: int  #: Id that ends a document.
    encode: Callable[[bytes], NDArray[np.uint32]]  #: UTF-8 text to ids.


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose ids are the bytes themselves."""

    def encode(text: bytes) -> NDArray[np.uint32]:
        return np.frombuffer(text, np.uint8).astype(np.uint32)

    return Tokenizer(name="bytes", vocab_size=BYTE_VOCAB_SIZE, end=BYTE_END, encode=encode)


def open_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``; "" means bytes."""
    if not path:
        return byte_tokenizer()
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError as error:
        raise DataError(
            f"data.tokenizer: {path} needs the package tokenizers; pip install 'everstep[hf]'"
        ) from error
    try:
        content = Path(path).read_bytes()
        inner = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises bare Exception for a bad file
        raise DataError(f"data.tokenizer: {path} cannot be read: {error}", path=path) from error
    vocab_size = inner.get_vocab_size()
    ends = [inner.token_to_id(name) for name in END_OF_TEXT_NAMES]
    end = next((number for number in ends if number is not None), None)
    if end is None:
        raise DataError(
            f"data.tokenizer: {path} has no token that ends a document; one of "
            f"{', '.join(END_OF_TEXT_NAMES)} is needed",
            path=path,
        )

    def encode(text: bytes) -> NDArray[np.uint32]:
        ids = inner.encode(text.decode(errors="replace"), add_special_tokens=False).ids
        return np.asarray(ids, np.uint32)

    digest = hashlib.sha256(content).hexdigest()[:16]
    return Tokenizer(name=f"hf-{digest}", vocab_size=vocab_size, end=end, encode=encode)
