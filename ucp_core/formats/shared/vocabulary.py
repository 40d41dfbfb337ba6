"""Finds how many rows of Megatron's embeddings are tokens, and how many are padding. Pure.

The embedding and the output layer have ``padded_vocab_size`` rows: the tokenizer's size, rounded up
to a multiple of ``make_vocab_size_divisible_by`` times the tensor parallel ranks. Another number of
ranks pads differently, so the rows after the tokens are not state. The arguments have the size only
if the user gave it, as ``vocab_size``; otherwise only the tokenizer knows it.

Sources: ``build_tokenizer`` and ``NullTokenizer`` of Megatron-LM, core 0.5 to 0.19.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from ucp_core.geometry import TensorEntry, TensorKey
from ucp_core.language import Cut, Pattern
from ucp_core.manifest import Item
from ucp_core.torch_files import Opaque

_NAMES = re.compile(
    r"(.*\.)?(word_embeddings|word_embeddings_for_head|output_layer|lm_head)\.(weight|bias)"
)
#: Tokenizers that add the end-of-document token to the given size, up to core 0.17.
_NULL, _NULL_MULTIMODAL = "NullTokenizer", "NullMultimodalTokenizer"
#: An argument of the Megatron versions whose ``NullTokenizer`` does not add the token.
_SINCE_EXACT = "null_tokenizer_eod_id"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of a run, as its arguments describe it."""

    #: Rows of the saved embedding. If it is None, everything here is unknown.
    num_rows: int | None = None
    num_tokens: int | None = None  #: Rows that are tokens; None: unknown.
    why_unknown: str = ""  #: The reason, for people.

    def extent(self, fqn: str, num_rows: int) -> int | None:
        """Return how many of a tensor's rows are tokens; None: all, or unknown."""
        is_padded = self.num_rows == num_rows and _NAMES.fullmatch(fqn) is not None
        return self.num_tokens if is_padded else None

    def item(self, entries: Mapping[TensorKey, TensorEntry]) -> dict[str, Item]:
        """Return the item that says what the reader did with the padding; empty without padding."""
        rows = {
            key.fqn: entry.shape[0]
            for key, entry in sorted(entries.items())
            if key.slot == "weight" and entry.shape and _NAMES.fullmatch(key.fqn)
        }
        kept = next((fqn for fqn, count in rows.items() if count == self.num_rows), None)
        cut = next((fqn for fqn, count in rows.items() if count < (self.num_rows or 0)), None)
        if cut is not None:
            note = (
                f"{cut} and similar tensors have {rows[cut]} of {self.num_rows} rows: the others "
                "are padding of the source's layout, and zeros in a target that needs them"
            )
        elif kept is not None and self.num_tokens is None:
            note = (
                f"{kept} keeps all {self.num_rows} rows, padding among them: {self.why_unknown}; "
                "a rule can tell where it begins: {cut: {dim: 0, unpadded: N}}"
            )
        else:
            return {}
        return {"vocabulary": Item("reshard", note)}


def arguments_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's ``args`` in a pickle; empty if it has none."""
    found = tree.get("args")
    values = found.state if isinstance(found, Opaque) else found
    return values if isinstance(values, dict) else {}


def vocabulary_of(arguments: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of Megatron's arguments; ignore a size that does not fit the rows."""
    rows, size = _number(arguments, "padded_vocab_size"), _number(arguments, "vocab_size")
    if rows is None:
        return Vocabulary()
    if size is None:
        return Vocabulary(rows, None, "args has no vocab_size, only the tokenizer knows it")
    kind = arguments.get("tokenizer_type")
    one_more = kind == _NULL_MULTIMODAL or (kind == _NULL and _SINCE_EXACT not in arguments)
    size += int(one_more)
    step = _number(arguments, "make_vocab_size_divisible_by")
    if step is not None:
        step *= _number(arguments, "tensor_model_parallel_size") or 1
    if size > rows or (step is not None and -(-size // step) * step != rows):
        why = f"args has vocab_size {size}, which does not pad to {rows}"
        return Vocabulary(rows, None, why)
    return Vocabulary(rows, size)


def tells_padding(pattern: Pattern | None) -> TypeGuard[Cut]:
    """Return whether a rule says where the padding of a tensor begins."""
    return isinstance(pattern, Cut) and pattern.unpadded is not None


def _number(arguments: Mapping[str, Any], name: str) -> int | None:
    value = arguments.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
