"""Fill a model with values that no version of the run holds: from a checkpoint, or new ones."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ucp_core.native import Checkpoint
from workers.data import drawn, seeded
from workers.parallel import own_names
from workers.state import HostBuffer, StateEntry, set_scalars
from workers.train.context import WorkerContext
from workers.train.executor import ShardedModel, all_agree
from workers.train.loading.init_from import (
    Initial,
    Needed,
    Start,
    load_initial,
    refuse_uncounted,
)
from workers.train.loading.restore import Target

Initialise = Callable[[str, tuple[int, ...]], Tensor]


def start_from(
    sharded: ShardedModel, context: WorkerContext, buffer: HostBuffer, *, tell: bool
) -> Initial:
    """Load the checkpoint that the settings name; see ``load_initial``."""
    run = context.settings.start
    start = Start(
        init_from=run.init_from,
        init_state=run.init_state,
        init_rename=run.init_rename,
        init_missing=run.init_missing,
        init_rows=run.init_rows,
    )
    kept = {entry.fqn: entry.tensor.dtype for entry in sharded.state.entries()}
    needed = {
        name: Needed(dtype=kept.get(name, torch.float32), shape=shape, is_optional=0 in shape)
        for name, shape in sharded.shapes.items()
    }
    for name, held in sharded.buffers.named().items():
        needed[name] = Needed(dtype=held.dtype, shape=tuple(held.shape), is_optional=True)

    def to_fill() -> Sequence[StateEntry]:
        if start.init_state == "all":
            sharded.prime()
        return sharded.state.entries()

    def load(checkpoint: Checkpoint, need: Sequence[StateEntry]) -> int:
        target = Target(need, buffer, context.settings.checkpoint.threads, context.progress.moved)
        return target.fill(checkpoint, widen=True)

    initial = load_initial(
        start,
        needed,
        to_fill,
        model=sharded.model,
        load=load,
        everywhere=lambda agreed: all_agree(agreed, sharded.device),
        tell=tell,
    )
    if start.init_state == "all":
        names = sharded.state.scalars().keys()
        refuse_uncounted(start, initial, sharded.parameters, sharded.optimizers, names)
    set_optimizer(
        sharded,
        initial.without_state,
        initial.scalars,
        initial.changed,
        unstarted=start.init_state == "weights",
    )
    return initial


def fill(
    sharded: ShardedModel,
    build: Callable[[], nn.Module],
    initialise: Initialise | None,
    *,
    seed: int,
    is_new: bool,
    initial: Initial | None,
) -> None:
    """Fill the tensors that no checkpoint holds: buffers, and at step 0 the weights.

    ``is_new`` says that no version of the run was loaded; ``initial`` is the checkpoint from which
    the run started, if any.
    """
    new = set[str]()
    kept = sharded.buffers.named()
    if is_new:
        new = {shard.fqn for shard in sharded.shards} | kept.keys()
    if initial is not None:
        new &= initial.missing | initial.rows.keys()
    buffers = {
        name: buffer
        for name, buffer in own_names(sharded.model.named_buffers()).items()
        if name in new or name not in kept
    }
    values: dict[str, Tensor] = {}
    with_weights = bool(new - kept.keys()) and initialise is None
    if buffers or with_weights:
        values = initial_values(build, seed, with_weights=with_weights)
    with torch.no_grad():
        for name, buffer in buffers.items():
            kept.get(name, buffer).copy_(values[name])
        for shard in sharded.shards:
            if shard.fqn not in new:
                continue
            if initialise is not None:
                value = initialise(shard.fqn, shard.shape)
            else:
                value = values[shard.fqn]
            first = initial.rows.get(shard.fqn, 0) if initial is not None else 0
            for box, local in shard.pieces(shard.local):
                fresh = value[tuple(map(slice, box.start, box.stop))]
                if first:
                    loaded = max(0, first - box.start[0])
                    local, fresh = local[loaded:], fresh[loaded:]  # noqa: PLW2901
                local.copy_(fresh)
    sharded.buffers.restore()


def set_optimizer(
    sharded: ShardedModel,
    without_state: Collection[str],
    scalars: Mapping[str, Any],
    changed: Sequence[Any],
    *,
    unstarted: bool,
) -> None:
    """Set the optimizer's values from a version, in addition to its tensors.

    ``unstarted`` means that the optimizer had done no step.
    """
    # ``prime`` made this state, and the version has none.
    bare = sharded.parameters.keys() & set(without_state)
    sharded.optimizers.forget(sharded.parameters[fqn] for fqn in bare)
    set_scalars(sharded.parameters, sharded.optimizers, scalars)
    sharded.optimizers.set_changed(changed)
    if not unstarted:
        sharded.optimizers.begin()


def initial_values(
    build: Callable[[], nn.Module], seed: int, *, with_weights: bool
) -> dict[str, Tensor]:
    """Return the buffers of the model that ``build`` makes on the CPU, by name.

    ``with_weights`` returns the parameters too: then the whole model is in memory.
    """
    found = None if with_weights else _buffers_alone(build, seed)
    if found is not None:
        return found
    with seeded(seed):
        whole = build()
    buffers = whole.named_buffers(remove_duplicate=False)
    return own_names([*whole.named_parameters(), *buffers])


def _buffers_alone(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor] | None:
    """Return the buffers, made without parameters; None if that might change their values.

    Parameters have no values, so none are initialised. A buffer that depends on one has no value
    either, and a random one depends on all random numbers before it.
    """

    def without_values(
        _module: nn.Module, _name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    with seeded(seed):
        before = drawn()
        hook = register_module_parameter_registration_hook(
            without_values  # type: ignore[arg-type]  # a result replaces the parameter
        )
        try:
            model = build()
        except Exception:  # noqa: BLE001  it used a value; the whole model may be built
            return None
        finally:
            hook.remove()
        if drawn() != before:
            return None
    buffers = own_names(model.named_buffers(remove_duplicate=False))
    return None if any(buffer.is_meta for buffer in buffers.values()) else buffers
