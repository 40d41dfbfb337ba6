"""Build the device mesh of an attempt, and shard the model over it."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.parallel.context import SequenceParts, apply_sequence_plan
    from workers.parallel.fsdp import (
        LocalShard,
        drop_gathered,
        fsdp_modules,
        is_whole,
        local_shards,
        materialize,
        num_foreign,
        own_names,
        shard_model,
    )
    from workers.parallel.mesh import Mesh, build_mesh
    from workers.parallel.pipeline import CalledSignal, PassHooks, Pipeline, StageModel, Stages
    from workers.parallel.placements import boxes_of, cuts_of
    from workers.parallel.tensor import ModelPlan, apply_tensor_plan
    from workers.parallel.units import Units, Used


__getattr__ = lazy_door(__name__)
