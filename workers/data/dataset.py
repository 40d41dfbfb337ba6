"""Tokens on disk, cut into samples: two splits, memory-mapped, the same on every worker.

Text is tokenized once per node. The tokens are in the cache directory under a hash of everything
that they depend on. Every process maps them, and opens them once for all attempts.
"""

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucp_core.storage import open_store
from workers.data.files import Arrays, cached_arrays
from workers.data.text import TextSource, find_source, is_held_out
from workers.data.tokens import Tokenizer, open_tokenizer
from workers.errors import DataError
from workers.settings import DataSettings


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A sequence of tokens, cut into samples that overlap by one token."""

    tokens: NDArray[Any]  #: All tokens, on disk.
    sequence_length: int  #: Tokens that a sample predicts; the sample has one more.

    @property
    def num_samples(self) -> int:
        """Return the number of whole samples."""
        return max(0, len(self.tokens) - 1) // self.sequence_length

    def batch(self, samples: Iterable[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the inputs and the targets, ``(len(samples), sequence_length)`` each."""
        length = self.sequence_length
        rows = [self.tokens[at * length : (at + 1) * length + 1] for at in samples]
        tokens = np.stack(rows).astype(np.int64)
        return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """A tokenized source."""

    train: Split
    held_out: Split  #: The split for validation, from other documents.
    vocab_size: int  #: Token ids are below this.
    digest: str  #: Hash over the tokens of both splits; equal on workers with equal data.


@functools.lru_cache(maxsize=4)
def open_texts(settings: DataSettings) -> Texts:
    """Return the samples of ``settings``; cached within a process."""
    tokenizer = open_tokenizer(settings.tokenizer)
    source = find_source(settings)
    files = [(name, open_store(path)) for name, path in source.files]
    depends = {
        **asdict(settings),
        "tokenizer": tokenizer.name,
        "files": [(name, store.stamp(at).text) for name, (store, at) in files],
    }
    for name in ("sequence_length", "validation_samples", "cache_directory"):
        del depends[name]
    held = cached_arrays(
        depends,
        settings.cache_directory,
        lambda: _tokens(settings, source, tokenizer),
        setting="data.cache_directory",
    )
    splits = [Split(held[name], settings.sequence_length) for name in ("train", "held_out")]
    for name, split in zip(("training", "validation"), splits, strict=True):
        if split.num_samples < 1:
            raise DataError(
                f"data.source: {source.described} leaves {len(split.tokens)} tokens for {name}, "
                f"less than one sample of {settings.sequence_length + 1}; give more text, or "
                "change data.sequence_length or data.validation_share",
                source=settings.source,
            )
    return Texts(splits[0], splits[1], tokenizer.vocab_size, held["digest"].tobytes().hex())


def _tokens(settings: DataSettings, source: TextSource, tokenizer: Tokenizer) -> Arrays:
    """Return the tokens of both splits, and a digest of them."""
    parts: dict[str, list[NDArray[np.uint32]]] = {"train": [], "held_out": []}
    end = np.array([tokenizer.end], np.uint32)
    for name, text in source.documents():
        held_out = is_held_out(name, share=settings.validation_share, seed=settings.seed)
        parts["held_out" if held_out else "train"] += [tokenizer.encode(text), end]
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    digest = hashlib.sha256()
    found: Arrays = {}
    for name, arrays in parts.items():
        found[name] = np.concatenate(arrays or [end[:0]]).astype(dtype)
        digest.update(f"{name} {len(found[name])} {tokenizer.name} ".encode())
        digest.update(found[name].tobytes())
    return {**found, "digest": np.frombuffer(digest.digest(), np.uint8)}
