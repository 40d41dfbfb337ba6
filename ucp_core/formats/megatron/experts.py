"""Finds the names and places of experts in the whole model from the arguments. Pure.

Every expert-parallel rank numbers its experts from 0, and repeats everything else. With several
such ranks Megatron chains two optimizers, the second for the experts. Each expert is a module
(``SequentialMLP``, ``SwitchMLP``) or a parameter of one module (``TEGroupedMLP``), or all experts
of a rank are one parameter (``GroupedMLP``). Only the arguments say how many experts such a
parameter holds, and its shape must agree. The reader gives it the name that it has in
``torch_dist``, where one parameter holds the experts of all ranks.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ucp_core.errors import CheckpointCorruptError, UnsupportedVersionError
from ucp_core.geometry import TensorKey
from ucp_core.torch_files import TensorRef

_SINGLE = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")
_GROUPED = re.compile(r"(.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)()")
_FUSED = re.compile(r"(.*\.experts\.)weight([12])")
_FUSED_NAME = re.compile(r".*\.experts\.experts\.linear_fc([12])\.weight")
_EXPERTS = (".experts.", ".local_experts.")
_GATED = ("swiglu", "gated_linear_unit", "quick_geglu")


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to an expert."""
    return any(part in name for part in _EXPERTS)


def is_gated(arguments: Mapping[str, Any]) -> bool:
    """Return whether the first linear of an MLP is a gate and an up projection."""
    return any(arguments.get(name) for name in _GATED)


class Experts(NamedTuple):
    """The experts, as Megatron's arguments describe them."""

    arguments: Mapping[str, Any]  #: Megatron's ``args``.
    ranks: int  #: Expert-parallel ranks, 1 or more.
    total: int | None  #: Experts of a layer; None if unknown.
    tp: int  #: Tensor-parallel ranks, which also shard the experts.

    @property
    def num_local(self) -> int:
        """Return the number of experts on each rank."""
        return (self.total or 0) // self.ranks

    def global_name(self, name: str, rank: int, file: str) -> str:
        """Return the name that an expert-parallel rank's parameter has in the whole model."""
        if not is_expert(name):
            return name
        fused = _FUSED.fullmatch(name)
        if fused is not None:
            return f"{fused[1]}experts.linear_fc{fused[2]}.weight"
        match = _SINGLE.fullmatch(name) or _GROUPED.fullmatch(name)
        if is_fused(name) or (match is None and self.ranks > 1):
            raise UnsupportedVersionError(
                f"{file}: {name} belongs to experts in an unknown form, which cannot be "
                "combined over ranks; save in torch_dist format"
            )
        if match is None or self.ranks == 1:
            return name
        number = int(match[2])
        if number >= self.num_local:
            raise CheckpointCorruptError(
                f"{file}: {name} is expert {number} of a rank, but args gives a rank only "
                f"{self.num_local}"
            )
        return f"{match[1]}{rank * self.num_local + number}{match[3]}"

    def part(self, key: TensorKey, rank: int, ref: TensorRef) -> tuple[TensorRef, int]:
        """Return a rank's parameter that holds all its experts as a part of the model's tensor.

        Args:
            key: The model's tensor: ``[experts, out, in]``.
            ref: The parameter, or a slot of it: ``[in, experts * out]`` for the first linear,
                ``[experts * in, out]`` for the second, both viewed as ``[experts, in, out]``.

        Returns:
            The same elements as ``[experts, out, in]``, and the number of the first expert.
        """
        hidden, ffn, gates = self._sizes(key, ref)
        match = _FUSED_NAME.fullmatch(key.fqn)
        assert match is not None, f"{key} is not a parameter of several experts"
        if match[1] == "1":
            rows, width = gates * ffn, hidden
            shape = hidden, self.num_local * rows
        else:
            rows, width = hidden, ffn
            shape = self.num_local * width, hidden
        if ref.shape != shape or ref.byte_strides is not None:
            form = f"{list(ref.shape)}{'' if ref.byte_strides is None else ', not contiguous'}"
            raise CheckpointCorruptError(
                f"{ref.file}: {key}, with all {self.num_local} experts of the rank, is {form}, "
                f"but args makes it {list(shape)} (hidden_size {hidden}, moe_ffn_hidden_size "
                f"{ffn * self.tp}, {'gated' if gates > 1 else 'not gated'})"
            )
        strides = rows * width, 1, rows
        view = ref._replace(shape=(self.num_local, rows, width), strides=strides)
        return view, rank * self.num_local

    def _sizes(self, key: TensorKey, ref: TensorRef) -> tuple[int, int, int]:
        """Return the sizes of an expert on a rank: hidden, between its linears, 2 if gated."""
        sizes: dict[str, Any] = {
            "num_experts": self.total,
            "hidden_size": self.arguments.get("hidden_size"),
            # Both were one argument before megatron-core 0.10.
            "moe_ffn_hidden_size": self.arguments.get("moe_ffn_hidden_size")
            or self.arguments.get("ffn_hidden_size"),
        }
        wrong = [f"{name} {v!r}" for name, v in sizes.items() if not isinstance(v, int) or v < 1]
        if not self.arguments.get("moe_grouped_gemm"):
            wrong.append(f"moe_grouped_gemm {self.arguments.get('moe_grouped_gemm')!r}")
        _, hidden, ffn = sizes.values()
        if wrong or ffn % self.tp:
            raise UnsupportedVersionError(
                f"{ref.file}: {key} holds all experts of the rank in one parameter, which only "
                "args could divide, and it has "
                f"{', '.join(wrong) or f'moe_ffn_hidden_size {ffn}'} for {self.tp} tensor "
                "parallel rank(s); save in torch_dist format"
            )
        return hidden, ffn // self.tp, 2 if is_gated(self.arguments) else 1


def is_fused(name: str) -> bool:
    """Return whether each rank holds several experts of a tensor in one parameter."""
    return _FUSED_NAME.fullmatch(name) is not None


def assigned(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the groups with their parameters, and the parameters that do not fit one group.

    Megatron saves groups without names. It groups parameters by expert, weight decay and learning
    rate, and by default decays everything but biases and vectors.
    """
    named: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
    decoupled = any(group.get("is_decoupled_lr") for group in groups)
    # Without expert-parallel ranks, experts share the groups of all other parameters.
    apart = any(group.get("is_expert_parallel") for group in groups)
    unsure: list[str] = []
    for fqn, shape in shapes.items():
        fits = [
            group
            for group in named
            if len(groups) == 1 or _fits(group, fqn, shape, decoupled=decoupled, apart=apart)
        ]
        if len(fits) == 1:
            fits[0]["params"].append(fqn)
        else:
            unsure.append(fqn)
    return named, unsure


def _fits(
    group: Mapping[str, Any], fqn: str, shape: Sequence[int], *, decoupled: bool, apart: bool
) -> bool:
    is_outer = fqn.startswith(("embedding.", "output_layer."))
    return (
        bool(group.get("is_expert_parallel")) == (apart and is_expert(fqn))
        and (group.get("wd_mult", 1.0) == 0.0) == is_plain(fqn, shape)
        and (not decoupled or bool(group.get("is_decoupled_lr")) == is_outer)
    )


def is_plain(fqn: str, shape: Sequence[int]) -> bool:
    """Return whether Megatron leaves a parameter out of weight decay by default."""
    return fqn.endswith(".bias") or len(shape) == 1
