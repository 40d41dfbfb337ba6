"""Makes the content of each file of a DeepSpeed checkpoint, as trees for ``torch_writer``.

Each model-parallel rank has one ``Trees``. Keys and shapes follow DeepSpeed 0.19.8
(``engine._common_checkpoint_state``, ``stage_1_and_2.state_dict``, ``stage3._rigid_state_dict``).
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed.writing.model import Group, Model
from ucp_core.formats.deepspeed.writing.partitions import (
    PADDING,
    Span,
    group_spans,
    sub_groups,
    tensor_spans,
)
from ucp_core.formats.deepspeed.writing.streams import FlatReader, Range, RankShard
from ucp_core.formats.shared import number_of
from ucp_core.geometry import TensorEntry
from ucp_core.language import Placement
from ucp_core.native import refuse_taken
from ucp_core.numerics import FLOATS
from ucp_core.storage import Buffer, Store, join, undone
from ucp_core.torch_files import Instance, Named, Size, TensorData, write_torch_file

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
_INTEGERS = {"I64", "I32", "I16", "I8"}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The files of one model-parallel rank."""

    model: Model
    reader: FlatReader
    dtype: str  #: Dtype of the model's weights in the target.
    dp: int  #: Data-parallel ranks of the target.
    ep: int = 1  #: Expert-parallel ranks of the target.
    #: How tensors are sharded over tensor-parallel ranks; None: not at all.
    placements: Mapping[str, Placement] | None = None
    rank: int = 0  #: This tensor-parallel rank.

    def shard(self, entry: TensorEntry) -> RankShard:
        """Return this rank's shard of a tensor; a slot is sharded like its parameter."""
        if self.placements is None:
            return RankShard(entry, entry.shape)
        placement = self.placements[entry.key.fqn]
        return RankShard(entry, placement.shards[self.rank], placement.pieces[self.rank])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of a parameter or buffer."""
        return self.shard(self.model.weight(name)).shape

    def data(self, entry: TensorEntry, dtype: str | None = None) -> TensorData:
        """Return this rank's part of a tensor, cast to ``dtype`` if one is given."""
        shard = self.shard(entry)
        whole = [Range(shard, 0, prod(shard.shape))]
        return self.stream(shard.shape, dtype or entry.dtype, whole)

    def stream(self, shape: tuple[int, ...], dtype: str, ranges: Sequence[Range]) -> TensorData:
        """Return a tensor made of ranges of other tensors."""
        return TensorData(dtype, shape, lambda: self.reader.stream(ranges, dtype))

    def groups_of_shapes(self, groups: Iterable[Sequence[str]]) -> list[Any]:
        """Return ``param_shapes``: names in the order of flattening, by group."""
        return [OrderedDict((n, Size(self.shape(n))) for n in names) for names in groups]

    def module(self, empty: Iterable[str] = ()) -> OrderedDict[str, TensorData]:
        """Return the weights in the model's dtype, frozen parameters, buffers and aliases.

        Names in ``empty`` have an empty tensor, as at stage 3.
        """
        model, stand_in = self.model, TensorData.of_bytes(self.dtype, (0,), b"")
        tensors = OrderedDict.fromkeys((*model.parameters, *model.frozen), stand_in)
        left_out = set(empty)
        for name in model.weights:
            if name not in left_out:
                tensors[name] = self.data(model.weight(name), self._dtype_of(name))
        aliases = (pair for pair in model.ties.items() if pair[1] in tensors)
        tensors.update((alias, tensors[owner]) for alias, owner in aliases)
        return tensors

    def frozen_fragments(self, dp_rank: int) -> OrderedDict[str, TensorData]:
        """Return the part of every frozen parameter that a rank of stage 3 holds."""
        fragments: OrderedDict[str, TensorData] = OrderedDict()
        for name in self.model.frozen:
            spans = tensor_spans([prod(self.shape(name))], self.dp, dp_rank)
            fragments[name] = self._flat([name], spans, None, self._dtype_of(name))
        return fragments

    def optimizer_stage_1_2(self, stage: int, dp_rank: int, expert_rank: int) -> dict[str, Any]:
        """Return the ``optimizer_state_dict`` of one rank of stage 1 or 2.

        ``expert_rank`` is its number among the ranks that hold the same experts.
        """
        groups, mappings, masters, paddings = self.model.groups, [], [], []
        counts = [self.dp // self.ep if group.is_expert else self.dp for group in groups]
        state: dict[int, Any] = {}
        for index, group in enumerate(groups):
            numels = [prod(self.shape(name)) for name in group.names]
            rank = expert_rank if group.is_expert else dp_rank
            spans = group_spans(numels, counts[index], rank)
            held = [span for span in spans if span.tensor != PADDING]
            masters.append(self._flat(group.names, held, None, "F32"))
            paddings.append(sum(s.num_elements for s in spans if s.tensor == PADDING))
            state[index] = self._state(group, group.names, spans)
            mappings.append(_addresses(group.names, held))
        return self.scaling() | {
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
            **self.clipping(),
        }

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
                spans = tensor_spans(numels, self.dp, dp_rank)
                masters.append(self._flat(names, spans, None, "F32"))
                state[number] = self._state(group, names, spans)
        return self.scaling() | {
            "zero_stage": Instance("deepspeed.runtime.zero.config.ZeroStageEnum", (3,)),
            "partition_count": self.dp,
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
            parts = sub_groups(numels, self.dp, sub_group_size)
            found.append([[group.names[index] for index in part] for part in parts])
        return found

    def plain_optimizer(self) -> dict[str, Any] | None:
        """Return the optimizer's own ``state_dict``, as stage 0 in fp32 saves it."""
        if not self.model.groups:
            return None
        state: dict[int, Any] = {}
        param_groups: list[dict[str, Any]] = []
        first = 0
        for group in self.model.groups:
            numbers = list(range(first, first + len(group.names)))
            first += len(numbers)
            param_groups.append(hyper_parameters(group, numbers))
            for number, name in zip(numbers, group.names, strict=True):
                held = {slot: self.model.slot(name, slot) for slot in group.flat}
                values = {slot: self.data(entry) for slot, entry in held.items() if entry}
                if values or group.scalars:
                    state[number] = _scalars(group) | values
        return {"state": state, "param_groups": param_groups}

    def scaling(self) -> dict[str, Any]:
        """Return the loss scaler and its settings: the source's in fp16, otherwise none."""
        state: dict[str, Any] = {"cur_scale": 1.0, "dynamic": False}
        if self.dtype == "F16":
            kept = self.model.scaler
            is_ours = kept is not None and str(kept["class"]).startswith(_SCALERS)
            state = dict(kept["state"] if kept and is_ours else _NEW_SCALER)
            if not isinstance(state.get("dynamic"), bool) or "cur_scale" not in state:
                raise UcpError("the loss scaler of the source has no cur_scale or no dynamic")
            if isinstance(state.get("dtype"), str):
                state["dtype"] = Named("torch.float16")
        name = "DynamicLossScaler" if state["dynamic"] else "LossScaler"
        return {
            "loss_scaler": Instance(f"{_SCALERS}{name}", (), state),
            "dynamic_loss_scale": state["dynamic"],
            "overflow": False,
        }

    def clipping(self) -> dict[str, Any]:
        """Return the limit of the gradient's norm, if it is known."""
        clip_grad = self.model.clip_grad
        return {} if clip_grad is None else {"clip_grad": clip_grad}

    def _dtype_of(self, name: str) -> str | None:
        """Return the dtype of a weight in the target; None: the source's."""
        is_cast = self.model.weight(name).dtype in FLOATS or name not in self.model.frozen
        return self.dtype if is_cast and name not in self.model.buffers else None

    def _state(self, group: Group, names: Sequence[str], spans: Sequence[Span]) -> dict[str, Any]:
        flat = {slot: self._flat(names, spans, slot, dtype) for slot, dtype in group.flat.items()}
        return _scalars(group) | flat

    def _flat(
        self, names: Sequence[str], spans: Sequence[Span], slot: str | None, dtype: str | None
    ) -> TensorData:
        """Return one flat tensor, with zeros for a parameter that lacks the slot.

        Without ``slot`` it has the weights; without ``dtype``, that of the first parameter.
        """
        ranges: list[Range] = []
        for span in spans:
            entry = None
            if span.tensor != PADDING:
                name = names[span.tensor]
                entry = self.model.weight(name) if slot is None else self.model.slot(name, slot)
            shard = self.shard(entry) if entry is not None else None
            ranges.append(Range(shard, span.start, span.stop))
        shape = (sum(span.num_elements for span in spans),)
        return self.stream(shape, dtype or self.model.weight(names[0]).dtype, ranges)


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
    if dtype in _INTEGERS:
        return int(number_of(data, dtype))
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


_TAG = re.compile(r"[^/\\\x00-\x1f]+")


def write_files(
    store: Store,
    directory: str,
    tag: str,
    files: Callable[[], Iterable[tuple[str, Any]]],
    *,
    latest: str,
    progress: Callable[[int, int], None] | None,
    fsync: bool,
) -> None:
    """Write every file that ``files`` gives to ``directory/tag``, and then the file ``latest``.

    ``files`` yields names and trees; it is called twice if progress needs sizes. If the destination
    is in use, or reading or writing fails, no part of this checkpoint is left.
    """
    if _TAG.fullmatch(tag) is None or tag in {".", ".."}:
        raise UcpError(f"tag={tag!r} is not the name of a folder")
    refuse_taken(directory, store.list(directory))
    done_bytes = total_bytes = 0
    if progress is not None:
        for _, tree in files():
            # Each tensor of a file counts once.
            tensors: dict[int, TensorData] = {}
            _mapped(tree, lambda tensor: tensor, tensors)
            total_bytes += sum(tensor.num_bytes for tensor in tensors.values())

    def chunks(tensor: TensorData) -> Iterator[Buffer]:
        nonlocal done_bytes
        for chunk in tensor.chunks():
            yield chunk
            done_bytes += memoryview(chunk).nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)

    def counted(tensor: TensorData) -> TensorData:
        return TensorData(tensor.dtype, tensor.shape, lambda: chunks(tensor))

    folder = join(directory, tag)
    with undone(store, directory) as written:
        # A user can load a folder without ``latest`` by its tag.
        written.append(folder)
        for name, tree in files():
            own = _mapped(tree, counted, {})
            write_torch_file(store, join(folder, name), own, allow=DEEPSPEED_NAMES, fsync=fsync)
        written.append(join(directory, latest))
        store.write_atomic(written[-1], tag.encode(), fsync=True)


def _mapped(
    tree: Any, change: Callable[[TensorData], TensorData], known: dict[int, TensorData]
) -> Any:
    """Return a tree with other tensors; ``known`` gets them by the identity of the old ones."""
    if isinstance(tree, TensorData):
        return known.get(id(tree)) or known.setdefault(id(tree), change(tree))
    if isinstance(tree, dict):
        return type(tree)((key, _mapped(value, change, known)) for key, value in tree.items())
    return [_mapped(value, change, known) for value in tree] if type(tree) is list else tree
