"""Finds how DeepSpeed's tensors are sharded over tensor-parallel ranks.

It uses, in this order: the checkpoint's ``universal_checkpoint_info``, affine maps first; the
user's rules; evidence in the shards. Without any of these it raises an error, because a guess could
be silently wrong. Source: ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``) of DeepSpeed
0.19.8.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucp_core.errors import PatternError, UnsupportedVersionError
from ucp_core.formats.shared import refusing_nonsense, tells_padding
from ucp_core.geometry import TensorKey
from ucp_core.language import (
    Average,
    Cut,
    Pattern,
    Replicated,
    Rules,
    Unique,
    parse_affine_map,
)

#: The latest version of ``universal_checkpoint_info`` whose meaning is known.
_VERSION_MAX = 0.4
#: Since this version the checkpoint gives the widths of the parts of fused parameters.
_WIDTHS_VERSION = 0.4

_VOCABULARY = "vocabulary_parameter_patterns"
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGE = "parameter_to_average_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_TWO_PARTS = "parameter_with_2_sub_params_cat_dim_0"
_PARTS = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_AFFINE = "affine_map"
#: The keys about tensor parallelism.
_TELLING = (_VOCABULARY, _REPLICATED, _AVERAGE, _ROW, _TWO_PARTS, _PARTS, _AFFINE)

_FUSED_QKV = re.compile(r"(?:.*\.)?(?:self_)?attention\.query_key_value\.(?:weight|bias)")


class Names:
    """Finds the pattern that matches a name; most of DeepSpeed's patterns are whole names."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._exact: dict[str, str] = {}
        self._regexes: list[re.Pattern[str]] = []
        for pattern in dict.fromkeys(patterns):
            name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
            if pattern == f"^{re.escape(name)}$":
                self._exact[name] = pattern
            else:
                self._regexes.append(re.compile(pattern))

    def match(self, name: str) -> str | None:
        """Return the pattern that matches from the start of ``name``, as DeepSpeed does."""
        regexes = (regex.pattern for regex in self._regexes if regex.match(name))
        return self._exact.get(name) or next(regexes, None)


class Info:
    """The checkpoint's ``universal_checkpoint_info``."""

    def __init__(self, info: Mapping[str, Any], where: str) -> None:
        self.version = float(info.get("universal_checkpoint_version", 0.0))
        if self.version > _VERSION_MAX:
            raise UnsupportedVersionError(
                f"{where} has version {self.version}, this program reads up to "
                f"{_VERSION_MAX}: update everstep"
            )
        #: Whether the document says anything about tensor parallelism.
        self.tells = any(info.get(key) for key in _TELLING)
        #: Rows of the vocabulary without padding, or None.
        self.original_vocab_size: int | None = info.get("original_vocab_size")
        self.widths: dict[str, Any] = info.get(_WIDTHS) or {}
        patterns = {key: info.get(key) or () for key in (*_TELLING, _UNSUPPORTED)}
        affine = info.get(_AFFINE)
        self.affine = parse_affine_map(affine, where=f"{where}: {_AFFINE}") if affine else {}
        #: Sizes along the cut dim, and this dim, of fused parameters by pattern.
        self.parts: dict[str, tuple[Any, int]] = {}
        with refusing_nonsense(f"{where}: {_PARTS}", "DeepSpeed"):
            for item in patterns[_PARTS]:
                value = item if isinstance(item, dict) else item.state
                dim = int(value["partition_dim"])
                parts = tuple(value["shape"])[dim], dim
                self.parts.update(dict.fromkeys(value["patterns"], parts))
        patterns |= {_AFFINE: self.affine, _PARTS: self.parts}
        self._names = {key: Names(told) for key, told in patterns.items()}
        told = patterns[_UNSUPPORTED]
        self._reasons = told if isinstance(told, dict) else {}

    def match(self, kind: str, name: str) -> str | None:
        """Return the pattern of a kind that matches a name."""
        return self._names[kind].match(name)

    def has(self, kind: str, name: str) -> bool:
        """Return whether a pattern of a kind matches a name."""
        return self.match(kind, name) is not None

    def unsupported(self, name: str) -> str | None:
        """Return why a parameter cannot be resharded, if the checkpoint marks it so."""
        pattern = self.match(_UNSUPPORTED, name)
        return None if pattern is None else self._reasons.get(pattern) or "without a reason"


@dataclass(slots=True)
class TensorParallelLayouts:
    """Finds the pattern of a tensor."""

    degree: int  #: Tensor-parallel ranks.
    info: Info  #: The checkpoint's own statements.
    rules: Rules | None = None  #: The user's rules, for what the checkpoint does not say.
    #: Megatron's ``args``, if the checkpoint holds them.
    arguments: Mapping[str, Any] | None = None
    #: Whether all tensor-parallel ranks saved the same bytes of a tensor after training, judged by
    #: the checksums of the model files.
    equal: Callable[[str], bool] = lambda _: False
    buffers: frozenset[str] = frozenset()  #: Names of buffers; the lists of parameters omit them.
    #: How the pattern of a tensor was found, by name, if it was neither given nor trivial.
    chosen: dict[str, str] = field(default_factory=dict)

    def pattern(
        self, key: TensorKey, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Pattern, int | None]:
        """Return the pattern, and the extent of dim 0 without padding if there is padding.

        If nothing tells it, ``facts["unknown"]`` of the error names the tensor.
        """
        if not any(shapes):
            return (Unique() if self.degree == 1 else Replicated("first")), None
        is_vocabulary = self.info.has(_VOCABULARY, key.fqn)
        extent = self.info.original_vocab_size if is_vocabulary else None
        rule = None if self.rules is None else self.rules.match(key.fqn, key.slot)
        if self.degree == 1:
            return (rule, None) if tells_padding(rule) else (Unique(), extent)
        if (why := self.info.unsupported(key.fqn)) is not None and rule is not None:
            return rule, extent
        if why is not None:
            raise UnsupportedVersionError(
                f"{key}: the checkpoint declares it unsupported ({why}); give a rule for it with "
                "--rules"
            )
        listed = None if key.fqn in self.buffers else self._listed(key.fqn)
        if listed is None and rule is None:
            return self._unlisted(key, shapes, extent)
        return listed or rule or Unique(), extent

    def _unlisted(
        self, key: TensorKey, shapes: Sequence[tuple[int, ...]], extent: int | None
    ) -> tuple[Pattern, int | None]:
        """Return the pattern of a tensor without rule or list: DeepSpeed's converter cuts dim 0."""
        fqn = key.fqn
        if fqn in self.buffers and len(set(shapes)) == 1:
            self.chosen[fqn] = "replicated, because it is a buffer; converting compares the copies"
            return Replicated(), None
        if not self.info.tells or fqn in self.buffers:
            return self._derived(fqn, shapes), None
        if _FUSED_QKV.fullmatch(fqn):
            return self._query_key_value(fqn, shapes), extent
        if key.slot == "weight" and self.equal(fqn):
            # Megatron-DeepSpeed omits the position embeddings of a pipeline without ties from its
            # list.
            raise PatternError(
                f"{key}: the checkpoint does not list it, so it would be cut, but all "
                f"{self.degree} tensor parallel ranks hold the same values; say with --rules how "
                "it is spread"
            )
        return Cut(0), extent

    def _listed(self, fqn: str) -> Pattern | None:
        """Return the pattern that the checkpoint names for the tensor; None if it names none."""
        info = self.info
        if (affine := info.match(_AFFINE, fqn)) is not None:
            return info.affine[affine]
        kinds: dict[str, Pattern | None] = {
            _REPLICATED: Replicated(),
            _AVERAGE: Average(),
            _TWO_PARTS: Cut(0, parts=2),
            _PARTS: None,
            _ROW: Cut(1),
        }
        kind = next((kind for kind in kinds if info.has(kind, fqn)), None)
        return self._fused(fqn) if kind == _PARTS else kinds.get(kind or "")

    def _fused(self, fqn: str) -> Pattern:
        regex = self.info.match(_PARTS, fqn) or ""
        sizes, dim = self.info.parts[regex]
        parts = tuple(map(int, sizes)) if isinstance(sizes, list | tuple) else int(sizes)
        if self.info.version < _WIDTHS_VERSION and regex not in self.info.widths:
            # Until then a number meant this many equal parts, a tuple meant their sizes, and every
            # part was cut evenly.
            return Cut(dim, parts=parts)
        if regex not in self.info.widths:
            raise PatternError(
                f"{fqn}: {_PARTS} declares it fused, but {_WIDTHS} does not say how each part "
                "was cut; give a rule for it with --rules"
            )
        widths = tuple(tuple(map(int, row)) for row in self.info.widths[regex])
        parts = parts if isinstance(parts, tuple) else len(widths)
        return Cut(dim, parts=parts, part_widths=widths)

    def _query_key_value(self, fqn: str, shapes: Sequence[tuple[int, ...]]) -> Pattern:
        """Return the pattern of Megatron-DeepSpeed's fused projection.

        Up to December 2024 a rank held (q, k, v) of its first head group, then of the next, so that
        plain concatenation is right. Since commit 676a482c it holds all q, then all k, then all v.
        The patterns do not show the difference, but ``args`` has an option that came with the
        commit.
        """
        arguments = self.arguments
        if arguments is None:
            raise _unknown(
                fqn,
                shapes,
                "a fused query, key and value of Megatron: each rank holds either whole head "
                "groups, or all its q, then k, then v, and nothing in the checkpoint shows "
                "which; give --rules megatron-deepspeed-by-head or --rules "
                "megatron-deepspeed-blocks",
            )
        if "ds_sequence_parallel_fpdt" in arguments:
            self.chosen[fqn] = "q, k and v of each rank, because args is of a Megatron with FPDT"
            try:
                heads = int(arguments["num_attention_heads"])
                groups = int(arguments.get("num_key_value_heads") or heads)
                channels = int(arguments.get("kv_channels") or arguments["hidden_size"] // heads)
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                raise PatternError(f"{fqn}: args lacks its heads: {error!r}") from error
            return Cut(0, parts=(heads * channels, groups * channels, groups * channels))
        self.chosen[fqn] = "whole head groups of each rank, because args is older than FPDT"
        return Cut(0)

    def is_joined_wrongly(self, fqn: str) -> bool:
        """Return whether DeepSpeed's converter joined shards end to end that hold q, k and v."""
        is_newer = "ds_sequence_parallel_fpdt" in (self.arguments or {}) and self.degree > 1
        is_fused = _FUSED_QKV.fullmatch(fqn) is not None
        return is_newer and is_fused and not self.info.has(_PARTS, fqn)

    def _derived(self, fqn: str, shapes: Sequence[tuple[int, ...]]) -> Pattern:
        """Return the pattern that the shapes of the shards prove."""
        if len(set(shapes)) > 1:
            dims = [d for d in range(len(shapes[0])) if len({s[d] for s in shapes}) > 1]
            if len(dims) == 1 and len({len(s) for s in shapes}) == 1:
                self.chosen[fqn] = f"cut along dim {dims[0]}, because only that extent differs"
                return Cut(dims[0])
        raise _unknown(
            fqn,
            shapes,
            f"the checkpoint does not say how it is cut over {self.degree} tensor parallel ranks; "
            "give the rules of its model family (as --rules llama), or your own, with --rules FILE",
        )


def _unknown(fqn: str, shapes: Sequence[tuple[int, ...]], why: str) -> PatternError:
    shown = " ".join(str(list(shape)) for shape in shapes[:4])
    return PatternError(f"{fqn}: {why}", unknown=f"{fqn} {shown}")
