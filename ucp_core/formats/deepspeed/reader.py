"""Reads DeepSpeed's checkpoints, native and universal, without DeepSpeed and without torch.

ZeRO stages 0 to 3, tensor, pipeline, sequence and expert parallelism, with the float32 masters if
there are any. It reads only the pickles; tensors stay where they are.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError, UnsupportedVersionError
from ucp_core.formats.deepspeed.reading import (
    WEIGHT,
    Info,
    Modules,
    Native,
    RankState,
    Stage,
    TensorParallelLayouts,
    add_model_values,
    add_modules,
    add_optimizer_values,
    add_without_zero,
    add_zero3,
    add_zero12,
    buffer_names,
    open_native,
    param_shapes,
    read_layer_files,
    read_rank,
    tied_weight,
    weights_of,
)
from ucp_core.formats.deepspeed.recognition import NAME, Folder, locate, sort_names
from ucp_core.formats.shared import THREADS_MAX, Shards, number, refusing_nonsense
from ucp_core.geometry import DTYPE_BYTES, TensorKey
from ucp_core.manifest import Item
from ucp_core.torch_files import Opaque, TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucp_core.language import Rules
    from ucp_core.native import Checkpoint
    from ucp_core.storage import Store

_ZERO3 = 3
#: Number of elements of each master to compare.
_SAMPLE = 256


def read(
    store: Store, directory: str, *, rules: Rules | None = None, tag: str | None = None
) -> Checkpoint:
    """Open a checkpoint; ``tag`` or the file ``latest`` chooses one of several.

    See ``open_source`` for arguments and errors. ``rules`` override the checkpoint's own
    statements.
    """
    folder = locate(store, directory, tag)
    with refusing_nonsense(folder.directory, "DeepSpeed"):
        if not folder.universal:
            return _read_native(store, folder, rules)
        from ucp_core.formats.deepspeed.universal_reader import read_universal

        return read_universal(store, folder, lambda native, found: _layouts(native, found, rules))


def _read_native(store: Store, folder: Folder, rules: Rules | None) -> Checkpoint:
    native = open_native(store, folder.directory, sort_names(store.list(folder.directory)))
    _refuse_autoep(native)
    found = Modules(store, folder.directory, Shards(native.tp), masters=bool(native.optim))
    if native.optim:
        _add_zero(native, found)
    found.trained = found.shards.fqns()
    add_model_values(found, native)
    if not native.optim and native.layers and native.first.get("module", ()) is None:
        found.pipeline = read_layer_files(native)
    add_modules(native, found)
    if not native.optim:
        add_without_zero(native, found)
    layouts = _layouts(native, found, rules)
    found.put_shards(layouts)
    found.items |= {f"cut of {fqn}": Item("reshard", why) for fqn, why in layouts.chosen.items()}
    _refuse_repeated(native, found.shards, layouts)
    step = native.first.get("global_steps")
    if not isinstance(step, int) or step < 0:
        raise CheckpointCorruptError(
            f"{native.files.path(native.model[0, 0])}: global_steps is {step!r}",
            path=native.files.path(native.model[0, 0]),
        )
    found.step = step
    found.extents = native.files.extents
    found.layout = {"dp": native.dp, "tp": native.tp, "pp": native.pp}
    source = {"format": NAME, "version": native.version, "tag": folder.tag, "stage": native.stage}
    return found.checkpoint(source, world_size=native.dp * native.tp * native.pp)


def _refuse_autoep(native: Native) -> None:
    if native.first.get("ds_autoep_layers") or native.first.get("autoep_layers"):
        raise UnsupportedVersionError(
            f"{native.files.path(native.model[0, 0])}: experts of AutoEP are not supported; "
            "convert with DeepSpeed's ds_to_universal and give its folder",
            path=native.files.directory,
        )


def _add_zero(native: Native, found: Modules) -> None:
    is_zero3 = native.stage == _ZERO3
    read = {
        rank: read_rank(native.files.trees[name], name, is_zero3=is_zero3)
        for rank, name in native.optim.items()
    }
    _check_steps(native, read)
    config = native.first.get("ds_config")
    before = bool(config.get("use_data_before_expert_parallelism")) if config else False
    for mp in range(native.tp * native.pp):
        states = [read[dp, mp] for dp in range(native.dp)]
        where = native.model[0, mp]
        shapes = param_shapes(native.files.trees[where], where)
        if shapes is None:
            shapes = _shapes_by_mappings(native, mp, states)
        stage = Stage(native.rank(mp), states, shapes, where, data_before_expert=before)
        (add_zero3 if is_zero3 else add_zero12)(stage, found)
        saved, names = states[0].groups, stage.names
        more = len(names) - len(saved)
        found.add_groups([*saved, *[{}] * more], [*names, *[[]] * -more], native.optim[0, mp])
        if mp == 0:
            add_optimizer_values(found, states[0].rest, native.optim[0, mp])


def _shapes_by_mappings(
    native: Native, mp: int, states: Sequence[RankState]
) -> list[dict[str, tuple[int, ...]]]:
    """Return shapes by group if only the mappings name the parameters.

    This is so in bfloat16 without ZeRO, and with experts before DeepSpeed 0.19.
    """
    where = native.model[0, mp]
    held = weights_of(native, mp)
    found: list[dict[str, tuple[int, ...]]] = []
    for index in range(len(states[0].partitions)):
        shapes: dict[str, tuple[int, ...]] = {}
        for state in states:
            mapping = state.partitions[index].mapping
            if mapping is None:
                raise CheckpointCorruptError(
                    f"{where} has no param_shapes and {state.partitions[index].file} no "
                    "param_slice_mappings: nothing names the masters",
                    file=where,
                )
            for name in mapping:
                ref = held.get(name) or tied_weight(native, mp, name, _size(states, index, name))
                if not isinstance(ref, TensorRef):
                    raise CheckpointCorruptError(
                        f"{where} has neither param_shapes nor the tensor {name}", file=where
                    )
                shapes[name] = ref.shape
        found.append(shapes)
    return found


def _size(states: Sequence[RankState], index: int, name: str) -> int:
    """Return how many elements of a parameter the ranks hold together."""
    mappings = (state.partitions[index].mapping or {} for state in states)
    return sum(mapping[name][1] for mapping in mappings if name in mapping)


def _check_steps(native: Native, states: Mapping[tuple[int, int], RankState]) -> None:
    """Raise an error if the optimizer's step differs between ZeRO's files."""

    def step_of(state: RankState) -> float | None:
        for part in state.partitions[:1]:
            value = part.scalars.get("step")
            if isinstance(value, TensorRef):
                return number(native.files.store, native.files.directory, value)
            if value is not None:
                return value
        step = state.groups[0].get("step") if state.groups else None
        return step if isinstance(step, int | float) else None

    with ThreadPoolExecutor(min(THREADS_MAX, len(states))) as pool:
        steps = dict(zip(states, pool.map(step_of, states.values()), strict=True))
    known = [(step, native.optim[rank]) for rank, step in steps.items() if step is not None]
    for step, name in known:
        if step != known[0][0]:
            raise CheckpointCorruptError(
                f"{native.files.path(name)} is from step {step:g}, {known[0][1]} from step "
                f"{known[0][0]:g}: the folder mixes two saves",
                path=native.files.path(name),
                steps=(step, known[0][0]),
            )


def _layouts(native: Native, modules: Modules, rules: Rules | None) -> TensorParallelLayouts:
    trained_on = native.first.get("global_steps", 0) > 0
    arguments = native.first.get("args")
    state = arguments.state if isinstance(arguments, Opaque) else None
    return TensorParallelLayouts(
        degree=native.tp,
        info=_info(native),
        rules=rules,
        arguments=state if isinstance(state, dict) else None,
        # Weights in bfloat16 can be equal although their masters differ: 1.001 becomes 1.
        equal=lambda name: (
            trained_on
            and modules.same_bytes(name)
            and len(_beginnings(native, modules, TensorKey(name, WEIGHT))) <= 1
        ),
        moved=lambda name: _same_gradients(native, modules, name),
        buffers=buffer_names(native),
    )


def _same_gradients(native: Native, modules: Modules, name: str) -> bool:
    """Return whether all tensor parallel ranks begin with the same moments, not all zero.

    Different shards can be equal before the first gradient, but not after it.
    """
    slots = modules.shards.slots_of(name) - {WEIGHT, "step"}
    found = [_beginnings(native, modules, TensorKey(name, slot)) for slot in slots]
    return any(len(data) == 1 and any(*data) for data in found)


def _beginnings(native: Native, modules: Modules, key: TensorKey) -> set[bytes]:
    """Return the distinct first bytes of a tensor over tensor-parallel ranks."""
    found = set()
    for dtype, run in modules.shards.first_runs(key):
        size_bytes = min(run.stop - run.start, _SAMPLE) * DTYPE_BYTES[dtype]
        path = native.files.path(run.file)
        found.add(native.files.store.read_range(path, run.offset_bytes, size_bytes))
    return found


def _info(native: Native) -> Info:
    """Return the merged information of all stages, each of which knows only its own layers."""
    merged: dict[str, Any] = {}
    for (dp, mp), name in sorted(native.model.items()):
        info = native.files.trees[name].get("universal_checkpoint_info")
        if info is None and (dp, mp) in native.optim:
            state = native.files.trees[native.optim[dp, mp]].get("optimizer_state_dict")
            info = state.get("universal_checkpoint_info") if isinstance(state, dict) else None
        if dp != 0 or info is None:
            continue
        if not isinstance(info, dict):
            raise CheckpointCorruptError(f"{name}: universal_checkpoint_info is not a dict")
        for key, value in info.items():
            merged[key] = _merged(merged.get(key), value)
    return Info(merged, f"{native.files.directory}: universal_checkpoint_info")


def _merged(known: Any, value: Any) -> Any:
    if isinstance(known, list) and isinstance(value, list):
        return [*known, *(item for item in value if _told(item) not in map(_told, known))]
    if isinstance(known, dict) and isinstance(value, dict):
        return {**known, **{k: _merged(known.get(k), v) for k, v in value.items()}}
    return value if known is None else known


def _told(item: Any) -> Any:
    return (item.name, repr(item.state)) if isinstance(item, Opaque) else item


def _refuse_repeated(native: Native, shards: Shards, layouts: TensorParallelLayouts) -> None:
    """Raise an error if several stages hold a name that is not declared to be one tensor."""
    if native.pp == 1:
        return
    for fqn, stages in shards.stages().items():
        if len(stages) > 1 and not layouts.info.in_every_stage(fqn):
            raise CheckpointCorruptError(
                f"{fqn} is in the files of pipeline stages {sorted(stages)}, but is neither "
                "tied nor declared as replicated over stages: different tensors have one name",
                fqn=fqn,
            )
