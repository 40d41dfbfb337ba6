"""Makes the content of each file of a DeepSpeed checkpoint, as trees for ``torch_writer``.

Each model-parallel rank has one ``Trees``. Keys and shapes follow DeepSpeed 0.19.8
(``engine._common_checkpoint_state``, ``stage_1_and_2.state_dict``, ``stage3._rigid_state_dict``).
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed.writing.model import WEIGHT, FlatReader, Group, Model
from ucp_core.formats.deepspeed.writing.spread import (
    PADDING,
    Span,
    group_spans,
    sub_groups,
    tensor_spans,
)
from ucp_core.formats.shared import number_of
from ucp_core.geometry import TensorKey
from ucp_core.native import refuse_taken
from ucp_core.numerics import FLOATS
from ucp_core.storage import Buffer, Store, join, undone
from ucp_core.torch_files import Instance, Named, Size, TensorData, write_torch_file

DS_VERSION = "0.19.8"
ZERO3 = 3
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

    model: Model  #: The part of the model that the rank holds.
    reader: FlatReader
    dtype: str  #: Dtype of the model's weights in the target.
    dp: int = 1  #: Data-parallel ranks of the target.
    ep: int = 1  #: Expert-parallel ranks of the target.
    stage: int = 0  #: ZeRO's stage.
    sub_group_size: int = 0  #: Setting of stage 3.

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter or buffer."""
        return self.model.weight(name).shape

    def data(self, name: str, dtype: str | None = None, slot: str = WEIGHT) -> TensorData:
        """Return a tensor, cast to ``dtype`` if one is given; zeros if it lacks the slot."""
        shape = self.shape(name)
        return self._made([name], [Span(0, 0, prod(shape))], slot, dtype, shape)

    def _made(
        self,
        names: Sequence[str],
        spans: Sequence[Span],
        slot: str = WEIGHT,
        dtype: str | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> TensorData:
        """Return a tensor made of spans of a slot, with zeros for a parameter that lacks it.

        Without ``dtype`` it has that of the first parameter's slot, without ``shape`` it is flat.
        """
        held = [self.model.tensors.get(TensorKey(name, slot)) for name in names]
        ranges = [(None if s.tensor == PADDING else held[s.tensor], s.start, s.stop) for s in spans]
        kind = dtype or (held[0] or self.model.weight(names[0])).dtype
        flat = (sum(span.num_elements for span in spans),)
        return TensorData(
            kind, flat if shape is None else shape, lambda: self.reader.stream(ranges, kind)
        )

    def shapes(self, names: Iterable[str]) -> OrderedDict[str, Size]:
        """Return the shapes of parameters, in this order."""
        return OrderedDict((name, Size(self.shape(name))) for name in names)

    def module(self, empty: Iterable[str] = ()) -> OrderedDict[str, TensorData]:
        """Return the weights in the model's dtype, frozen parameters, buffers and aliases.

        Names in ``empty`` have an empty tensor, as at stage 3.
        """
        model, stand_in = self.model, TensorData.of_bytes(self.dtype, (0,), b"")
        tensors = OrderedDict.fromkeys((*model.parameters, *model.frozen), stand_in)
        left_out = set(empty)
        for name in model.weights:
            if name not in left_out:
                tensors[name] = self.data(name, self._dtype_of(name))
        aliases = (pair for pair in model.ties.items() if pair[1] in tensors)
        tensors.update((alias, tensors[owner]) for alias, owner in aliases)
        return tensors

    def frozen_fragments(self, dp_rank: int) -> OrderedDict[str, TensorData]:
        """Return the part of every frozen parameter that a rank of stage 3 holds."""

        def part(name: str) -> TensorData:
            spans = tensor_spans([prod(self.shape(name))], self.dp, dp_rank)
            return self._made([name], spans, dtype=self._dtype_of(name))

        return OrderedDict((name, part(name)) for name in self.model.frozen)

    def optimizer(self, dp_rank: int, expert_rank: int) -> dict[str, Any]:
        """Return the ``optimizer_state_dict`` of one rank of stages 1 to 3.

        ``expert_rank`` is its number among the ranks that hold the same experts.
        """
        groups, parts, is_zero3 = self.model.groups, self.sub_groups(), self.stage == ZERO3
        counts = [self.dp // self.ep if group.is_expert else self.dp for group, _ in parts]
        cut = tensor_spans if is_zero3 else group_spans
        state, masters, mappings, paddings = {}, [], [], []
        for number, ((group, names), count) in enumerate(zip(parts, counts, strict=True)):
            numels = [prod(self.shape(name)) for name in names]
            spans = cut(numels, count, expert_rank if group.is_expert else dp_rank)
            held = [span for span in spans if span.tensor != PADDING]
            masters.append(self._made(names, spans if is_zero3 else held, dtype="F32"))
            paddings.append(sum(s.num_elements for s in spans if s.tensor == PADDING))
            mappings.append(_addresses(names, held))
            items = group.flat.items()
            flat = {slot: self._made(names, spans, slot, dtype) for slot, dtype in items}
            if values := _scalars(group) | flat:
                state[number] = values
        numbers = [[n for n, (own, _) in enumerate(parts) if own is group] for group in groups]
        param_groups = list(map(hyper_parameters, groups, numbers))
        base = {"state": state, "param_groups": param_groups}
        zero_stage = Instance("deepspeed.runtime.zero.config.ZeroStageEnum", (self.stage,))
        if is_zero3:
            return self.scaling() | {
                "zero_stage": zero_stage,
                "partition_count": self.dp,
                "optimizer_state_dict": base,
                "fp32_flat_groups": masters,
            }
        return self.scaling() | {
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "zero_stage": zero_stage,
            "group_paddings": paddings,
            "partition_count": counts,
            "ds_version": DS_VERSION,
            "param_slice_mappings": mappings,
            **self.model.clipping,
        }

    def sub_groups(self) -> list[tuple[Group, Sequence[str]]]:
        """Return the names in each flat tensor of the optimizer: stage 3 cuts groups."""
        found: list[tuple[Group, Sequence[str]]] = []
        for group in self.model.groups:
            numels = [prod(self.shape(name)) for name in group.names]
            parts = [list(range(len(numels)))]
            if self.stage == ZERO3:
                parts = sub_groups(numels, self.dp, self.sub_group_size)
            found += [(group, [group.names[index] for index in part]) for part in parts]
        return found

    def plain_optimizer(self) -> dict[str, Any] | None:
        """Return the optimizer's own ``state_dict``, as stage 0 in fp32 saves it."""
        if not self.model.groups:
            return None
        state: dict[int, Any] = {}
        param_groups: list[dict[str, Any]] = []
        for group in self.model.groups:
            first = sum(len(other["params"]) for other in param_groups)
            numbers = list(range(first, first + len(group.names)))
            param_groups.append(hyper_parameters(group, numbers))
            for number, name in zip(numbers, group.names, strict=True):
                held = [s for s in group.flat if TensorKey(name, s) in self.model.tensors]
                values = {slot: self.data(name, slot=slot) for slot in held}
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

    def _dtype_of(self, name: str) -> str | None:
        """Return the dtype of a weight in the target; None: the source's."""
        is_cast = self.model.weight(name).dtype in FLOATS or name not in self.model.frozen
        return self.dtype if is_cast and name not in self.model.buffers else None


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
    address = "deepspeed.utils.tensor_fragment.fragment_address"
    starts = accumulate((span.num_elements for span in spans), initial=0)
    return OrderedDict(
        (names[s.tensor], Instance(address, (), {"numel": s.num_elements, "start": start}))
        for s, start in zip(spans, starts, strict=False)
    )


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

    def counted(tensor: TensorData) -> TensorData:
        def chunks() -> Iterator[Buffer]:
            nonlocal done_bytes
            for chunk in tensor.chunks():
                yield chunk
                done_bytes += memoryview(chunk).nbytes
                if progress is not None:
                    progress(done_bytes, total_bytes)

        return TensorData(tensor.dtype, tensor.shape, chunks)

    if progress is not None:
        for _, tree in files():
            # Each tensor of a file counts once.
            tensors: dict[int, TensorData] = {}
            _mapped(tree, counted, tensors)
            total_bytes += sum(tensor.num_bytes for tensor in tensors.values())
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
