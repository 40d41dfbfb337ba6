"""Reads DeepSpeed's checkpoints, native and universal, without DeepSpeed and without torch.

ZeRO stages 0 to 3, tensor, pipeline, sequence and expert parallelism, with the float32 masters if
there are any. It reads only the pickles; tensors stay where they are.
"""

from collections.abc import Mapping
from typing import Any

from ucp_core.errors import UnsupportedVersionError
from ucp_core.formats.deepspeed import reading
from ucp_core.formats.deepspeed.recognition import NAME, Folder, locate, sort_names
from ucp_core.formats.refusals import corrupt, two_saves
from ucp_core.formats.shared import Shards, refusing_nonsense
from ucp_core.language import Rules
from ucp_core.manifest import Item
from ucp_core.native import Checkpoint
from ucp_core.storage import Store
from ucp_core.torch_files import Opaque, TensorRef


def read(
    store: Store, directory: str, *, rules: Rules | None = None, tag: str | None = None
) -> Checkpoint:
    """Open a checkpoint; ``tag`` or the file ``latest`` chooses one of several.

    See ``open_source`` for arguments and errors. ``rules`` say what the checkpoint does not.
    """
    folder = locate(store, directory, tag)
    with refusing_nonsense(folder.directory, "DeepSpeed"):
        if not folder.universal:
            return _read_native(store, folder, rules)
        from ucp_core.formats.deepspeed.universal_reader import read_universal

        return read_universal(store, folder, lambda native, found: _layouts(native, found, rules))


def _read_native(store: Store, folder: Folder, rules: Rules | None) -> Checkpoint:
    native = reading.open_native(store, folder.directory, sort_names(store.list(folder.directory)))
    first, where = native.first, native.files.path(native.model[0, 0])
    if first.get("ds_autoep_layers") or first.get("autoep_layers"):
        raise UnsupportedVersionError(
            f"{where}: experts of AutoEP are not supported; convert with DeepSpeed's "
            "ds_to_universal and give its folder",
            path=where,
        )
    found = reading.Modules(store, folder.directory, Shards(native.tp), masters=bool(native.optim))
    if native.optim:
        _add_zero(native, found)
    found.trained = found.shards.fqns()
    reading.add_model_values(found, native)
    if not native.optim and native.layers and first.get("module", ()) is None:
        reading.read_layer_files(native, found)
    reading.add_modules(native, found)
    if not native.optim:
        reading.add_without_zero(native, found)
    layouts = _layouts(native, found, rules)
    found.entries |= found.shards.entries(layouts.pattern)
    found.items |= {f"cut of {fqn}": Item("reshard", why) for fqn, why in layouts.chosen.items()}
    step = first.get("global_steps")
    if not isinstance(step, int) or step < 0:
        raise corrupt(where, f"global_steps is {step!r}")
    found.step = step
    found.extents = native.files.extents
    found.layout = {"dp": native.dp, "tp": native.tp, "pp": native.pp}
    source = {"format": NAME, "version": native.version, "tag": folder.tag, "stage": native.stage}
    return found.checkpoint(source, world_size=native.dp * native.tp * native.pp)


def _add_zero(native: reading.Native, found: reading.Modules) -> None:
    trees = native.files.trees
    read = {
        rank: reading.read_rank(trees[name], name, is_zero3=native.is_zero3)
        for rank, name in native.optim.items()
    }
    _check_steps(native, read)
    config = native.first.get("ds_config")
    before = bool(config.get("use_data_before_expert_parallelism")) if config else False
    for mp in range(native.tp * native.pp):
        states = [read[dp, mp] for dp in range(native.dp)]
        where = native.model[0, mp]
        shapes = reading.param_shapes(trees[where], where)
        if shapes is None:
            shapes = reading.shapes_by_mappings(native, mp, states)
        stage = reading.Stage(native.rank(mp), states, shapes, where, data_before_expert=before)
        names = (reading.add_zero3 if native.is_zero3 else reading.add_zero12)(stage, found)
        saved = states[0].groups
        more = len(names) - len(saved)
        found.add_groups([*saved, *[{}] * more], [*names, *[[]] * -more], native.optim[0, mp])
        if mp == 0:
            reading.add_optimizer_values(found, states[0].rest, native.optim[0, mp])


def _check_steps(native: reading.Native, read: Mapping[Any, reading.RankState]) -> None:
    """Raise an error if ZeRO's files are of several steps, as an interrupted save leaves them."""
    steps: dict[Any, str] = {}
    for rank, state in read.items():
        value = state.partitions[0].scalars.get("step") if state.partitions else None
        if isinstance(value, TensorRef):
            # Equal numbers have equal checksums, so that nothing is read.
            known = value.extent is not None and value.extent.num_bytes == value.num_bytes
            value = value.extent.crc32 if known and value.extent else None
        if value is not None:
            steps.setdefault(value, native.optim[rank])
    if len(steps) > 1:
        one, other = list(steps.values())[:2]
        raise two_saves(native.files.path(other), f"it is of another step than {one}")


def _layouts(
    native: reading.Native, modules: reading.Modules, rules: Rules | None
) -> reading.TensorParallelLayouts:
    arguments = native.first.get("args")
    state = arguments.state if isinstance(arguments, Opaque) else None

    return reading.TensorParallelLayouts(
        degree=native.tp,
        info=_info(native),
        rules=rules,
        arguments=state if isinstance(state, dict) else None,
        equal=modules.same_bytes if native.first.get("global_steps", 0) > 0 else lambda _: False,
        buffers=reading.buffer_names(native),
    )


def _info(native: reading.Native) -> reading.Info:
    """Return the merged information of all stages, each of which knows only its own layers."""
    merged: Any = {}
    trees = native.files.trees
    for (dp, mp), name in sorted(native.model.items()):
        info = trees[name].get("universal_checkpoint_info")
        if info is None and (dp, mp) in native.optim:
            info = trees[native.optim[dp, mp]].get("optimizer_state_dict", {})
            info = info.get("universal_checkpoint_info")
        if dp == 0 and info is not None:
            merged = _merged(merged, dict(info))
    return reading.Info(merged, f"{native.files.directory}: universal_checkpoint_info")


def _merged(known: Any, value: Any) -> Any:
    if isinstance(known, list) and isinstance(value, list):
        return [*known, *(item for item in value if item not in known)]
    if isinstance(known, dict) and isinstance(value, dict):
        return {**known, **{k: _merged(known.get(k), v) for k, v in value.items()}}
    return value if known is None else known
