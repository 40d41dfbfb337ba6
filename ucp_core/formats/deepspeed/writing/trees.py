"""Makes the content of each file of a DeepSpeed checkpoint, as trees for ``torch_writer``.

Each model-parallel rank has one ``Trees``. Keys and shapes follow DeepSpeed 0.19.8
(``engine._common_checkpoint_state``, ``stage_1_and_2.state_dict``, ``stage3._rigid_state_dict``).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from math import prod
from typing import TYPE_CHECKING, Any

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed.writing.partitions import (
    PADDING,
    Span,
    group_spans,
    padding_of,
    sub_group_spans,
    sub_groups,
    tensor_spans,
)
from ucp_core.formats.deepspeed.writing.streams import Range, RankShard, everything
from ucp_core.numerics import FLOATS
from ucp_core.torch_files import Instance, Named, Size, TensorData

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucp_core.formats.deepspeed.writing.model import Group, Model
    from ucp_core.formats.deepspeed.writing.streams import FlatReader
    from ucp_core.geometry import TensorEntry
    from ucp_core.language import Placement

DS_VERSION = "0.19.8"
#: Classes of DeepSpeed that its own checkpoints hold.
DEEPSPEED_NAMES = frozenset(
    {
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "torch.float16",
    }
)
_SCALERS = "deepspeed.runtime.fp16.loss_scaler."
_ONE_DTYPES = {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b"}

#: DeepSpeed's defaults for fp16 (``fp16`` of its config).
_NEW_SCALER = {
    "cur_scale": 65536.0,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dynamic": True,
    "dtype": "torch.float16",
}


class Trees:
    """The files of one model-parallel rank.

    Args:
        dtype: Dtype of the model's weights in the target.
        dp: Data-parallel ranks of the target.
        ep: Expert-parallel ranks of the target.
        placements: How tensors are sharded over tensor-parallel ranks; None: not at all.
        rank: This tensor-parallel rank.
    """

    def __init__(
        self,
        model: Model,
        reader: FlatReader,
        *,
        dtype: str,
        dp: int,
        ep: int = 1,
        placements: Mapping[str, Placement] | None = None,
        rank: int = 0,
    ) -> None:
        self.model = model
        self._reader = reader
        self._dtype = dtype
        self._dp = dp
        self._ep = ep
        self._placements = placements
        self._rank = rank

    def shard(self, entry: TensorEntry) -> RankShard:
        """Return this rank's shard of a tensor; a slot is sharded like its parameter."""
        if self._placements is None:
            return RankShard(entry, entry.shape)
        placement = self._placements[entry.key.fqn]
        return RankShard(entry, placement.shards[self._rank], placement.pieces[self._rank])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of a parameter or buffer."""
        return self.shard(self.model.weight(name)).shape

    def data(self, entry: TensorEntry, dtype: str | None = None) -> TensorData:
        """Return this rank's part of a tensor, cast to ``dtype`` if one is given."""
        shard = self.shard(entry)
        return self.stream(shard.shape, dtype or entry.dtype, everything(shard))

    def stream(self, shape: tuple[int, ...], dtype: str, ranges: Sequence[Range]) -> TensorData:
        """Return a tensor made of ranges of other tensors."""
        return TensorData(dtype, shape, lambda: self._reader.stream(ranges, dtype))

    def model_dtype(self, entry: TensorEntry) -> str:
        """Return the dtype of a frozen parameter in the target: floats have the model's dtype."""
        return self._dtype if entry.dtype in FLOATS else entry.dtype

    def groups_of_shapes(self, groups: Iterable[Sequence[str]]) -> list[Any]:
        """Return ``param_shapes``: names in the order of flattening, by group."""
        return [OrderedDict((n, Size(self.shape(n))) for n in names) for names in groups]

    def module(self) -> OrderedDict[str, TensorData]:
        """Return the weights in the model's dtype, frozen parameters, buffers and aliases."""
        model = self.model
        tensors: OrderedDict[str, TensorData] = OrderedDict()
        for name in model.parameters:
            tensors[name] = self.data(model.weight(name), self._dtype)
        tensors.update(self.untrained())
        for alias, owner in model.ties.items():
            if owner in tensors:
                tensors[alias] = tensors[owner]
        return tensors

    def untrained(self) -> OrderedDict[str, TensorData]:
        """Return frozen parameters and buffers."""
        weight = self.model.weight
        tensors: OrderedDict[str, TensorData] = OrderedDict()
        for name in self.model.frozen:
            tensors[name] = self.data(weight(name), self.model_dtype(weight(name)))
        for name in self.model.buffers:
            tensors[name] = self.data(weight(name))
        return tensors

    def placeholders(self) -> OrderedDict[str, TensorData]:
        """Return the module of stage 3: empty parameters, unchanged buffers."""
        model = self.model
        empty = TensorData.of_bytes(self._dtype, (0,), b"")
        tensors: OrderedDict[str, TensorData] = OrderedDict()
        for name in (*model.parameters, *model.frozen):
            tensors[name] = empty
        for name in model.buffers:
            tensors[name] = self.data(model.weight(name))
        for alias, owner in model.ties.items():
            if owner in tensors:
                tensors[alias] = tensors[owner]
        return tensors

    def frozen_fragments(self, dp_rank: int) -> OrderedDict[str, TensorData]:
        """Return the part of every frozen parameter that a rank of stage 3 holds."""
        fragments: OrderedDict[str, TensorData] = OrderedDict()
        for name in self.model.frozen:
            entry = self.model.weight(name)
            spans = tensor_spans(prod(self.shape(name)), self._dp, dp_rank)
            fragments[name] = self._flat([name], spans, None, self.model_dtype(entry))
        return fragments

    def optimizer_stage_1_2(self, stage: int, dp_rank: int, expert_rank: int) -> dict[str, Any]:
        """Return the ``optimizer_state_dict`` of one rank of stage 1 or 2.

        Args:
            expert_rank: The rank's number among those that hold the same experts.
        """
        groups, mappings, masters, paddings = self.model.groups, [], [], []
        counts = [self._dp // self._ep if group.is_expert else self._dp for group in groups]
        state: dict[int, Any] = {}
        for index, group in enumerate(groups):
            numels = [prod(self.shape(name)) for name in group.names]
            rank = expert_rank if group.is_expert else dp_rank
            spans = group_spans(numels, counts[index], rank)
            held = [span for span in spans if span.tensor != PADDING]
            masters.append(self._flat(group.names, held, None, "F32"))
            paddings.append(padding_of(spans))
            state[index] = self._state(group, group.names, spans)
            mappings.append(_addresses(group.names, held))
        tree = self.scaling() | {
            "base_optimizer_state": {
                "state": {index: value for index, value in state.items() if value},
                "param_groups": [hyper_parameters(group, [i]) for i, group in enumerate(groups)],
            },
            "single_partition_of_fp32_groups": masters,
            "zero_stage": Instance("deepspeed.runtime.zero.config.ZeroStageEnum", (stage,)),
            "group_paddings": paddings,
            "partition_count": counts,
            "ds_version": DS_VERSION,
            "param_slice_mappings": mappings,
        }
        if self.model.clip_grad is not None:
            tree["clip_grad"] = self.model.clip_grad
        return tree

    def optimizer_stage_3(self, dp_rank: int, sub_group_size: int) -> dict[str, Any]:
        """Return the ``optimizer_state_dict`` of one rank of stage 3."""
        state: dict[int, Any] = {}
        masters: list[TensorData] = []
        param_groups: list[dict[str, Any]] = []
        for group, parts in zip(self.model.groups, self.sub_groups(sub_group_size), strict=True):
            numbers = list(range(len(masters), len(masters) + len(parts)))
            param_groups.append(hyper_parameters(group, numbers))
            for number, names in zip(numbers, parts, strict=True):
                numels = [prod(self.shape(name)) for name in names]
                spans = sub_group_spans(numels, self._dp, dp_rank)
                masters.append(self._flat(names, spans, None, "F32"))
                state[number] = self._state(group, names, spans)
        return self.scaling() | {
            "zero_stage": Instance("deepspeed.runtime.zero.config.ZeroStageEnum", (3,)),
            "partition_count": self._dp,
            "optimizer_state_dict": {
                "state": {number: value for number, value in state.items() if value},
                "param_groups": param_groups,
            },
            "fp32_flat_groups": masters,
        }

    def sub_groups(self, sub_group_size: int) -> list[list[list[str]]]:
        """Return the names of every sub-group of stage 3, by group."""
        found = []
        for group in self.model.groups:
            numels = [prod(self.shape(name)) for name in group.names]
            parts = sub_groups(numels, self._dp, sub_group_size)
            found.append([[group.names[index] for index in part] for part in parts])
        return found

    def plain_optimizer(self) -> dict[str, Any] | None:
        """Return the optimizer's own ``state_dict``, as stage 0 in fp32 saves it."""
        if not self.model.groups:
            return None
        state: dict[int, Any] = {}
        param_groups: list[dict[str, Any]] = []
        for group in self.model.groups:
            first = sum(len(other["params"]) for other in param_groups)
            param_groups.append(
                hyper_parameters(group, list(range(first, first + len(group.names))))
            )
            for number, name in enumerate(group.names, start=first):
                held = {slot: self.model.slot(name, slot) for slot in group.flat}
                values: dict[str, Any] = {
                    slot: self.data(entry) for slot, entry in held.items() if entry is not None
                }
                if values or group.scalars:
                    state[number] = _scalars(group) | values
        return {"state": state, "param_groups": param_groups}

    def _state(self, group: Group, names: Sequence[str], spans: Sequence[Span]) -> dict[str, Any]:
        flat = {slot: self._flat(names, spans, slot, dtype) for slot, dtype in group.flat.items()}
        return _scalars(group) | flat

    def _flat(
        self, names: Sequence[str], spans: Sequence[Span], slot: str | None, dtype: str
    ) -> TensorData:
        """Return one flat tensor, with zeros for a parameter that lacks the slot."""
        ranges: list[Range] = []
        for span in spans:
            entry = None
            if span.tensor != PADDING:
                name = names[span.tensor]
                entry = self.model.weight(name) if slot is None else self.model.slot(name, slot)
            shard = self.shard(entry) if entry is not None else None
            ranges.append(Range(shard, span.start, span.stop))
        return self.stream((sum(span.num_elements for span in spans),), dtype, ranges)

    def scaling(self) -> dict[str, Any]:
        """Return the loss scaler and its settings."""
        state = scaler_state(self.model, self._dtype)
        name = "DynamicLossScaler" if state["dynamic"] else "LossScaler"
        return {
            "loss_scaler": Instance(f"{_SCALERS}{name}", (), state),
            "dynamic_loss_scale": state["dynamic"],
            "overflow": False,
        }


def scaler_state(model: Model, dtype: str) -> dict[str, Any]:
    """Return the attributes of the loss scaler: the source's in fp16, otherwise none."""
    if dtype != "F16":
        return {"cur_scale": 1.0, "dynamic": False}
    state = dict(_NEW_SCALER)
    kept = model.scaler
    if kept is not None and str(kept["class"]).startswith(_SCALERS):
        state = dict(kept["state"])
        if not isinstance(state.get("dynamic"), bool) or "cur_scale" not in state:
            raise UcpError("the loss scaler of the source has no cur_scale or no dynamic")
    if isinstance(state.get("dtype"), str):
        state["dtype"] = Named("torch.float16")
    return state


def hyper_parameters(group: Group, params: list[int]) -> dict[str, Any]:
    """Return a group of the optimizer with betas as a tuple, because JSON has only lists."""
    hyper = {
        key: tuple(value) if key == "betas" and isinstance(value, list) else value
        for key, value in group.hyper.items()
    }
    return hyper | {"params": params}


def _scalars(group: Group) -> dict[str, Any]:
    return {slot: number(dtype, data) for slot, (dtype, data) in group.scalars.items()}


def number(dtype: str, data: bytes) -> TensorData | int:
    """Return a 0-d value.

    An integer stays an integer, which optimizers without tensor steps expect.
    """
    if dtype in _ONE_DTYPES and dtype.startswith("I"):
        return int(struct.unpack(_ONE_DTYPES[dtype], data)[0])
    return TensorData.of_bytes(dtype, (), data)


def _addresses(names: Sequence[str], spans: Sequence[Span]) -> OrderedDict[str, Instance]:
    """Return ``param_slice_mappings``: where each parameter is in the rank's range."""
    addresses: OrderedDict[str, Instance] = OrderedDict()
    start = 0
    for span in spans:
        addresses[names[span.tensor]] = Instance(
            "deepspeed.utils.tensor_fragment.fragment_address",
            (),
            {"numel": span.num_elements, "start": start},
        )
        start += span.num_elements
    return addresses
