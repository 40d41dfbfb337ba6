"""Parts of the readers of DeepSpeed's checkpoints.

``topology`` finds the files of a checkpoint. ``zero`` reads ZeRO's files, ``without_zero`` the
optimizer without ZeRO, ``weights`` the model's files. ``tensor_parallel`` finds how tensors are cut
over tensor-parallel ranks.
"""

from ucp_core.formats.deepspeed.reading.tensor_parallel import Info, TensorParallelLayouts
from ucp_core.formats.deepspeed.reading.topology import Native, open_native
from ucp_core.formats.deepspeed.reading.weights import (
    Modules,
    add_model_values,
    add_modules,
    add_optimizer_values,
    buffer_names,
    shapes_by_mappings,
)
from ucp_core.formats.deepspeed.reading.without_zero import add_without_zero, read_layer_files
from ucp_core.formats.deepspeed.reading.zero import (
    WEIGHT,
    RankState,
    Stage,
    add_zero3,
    add_zero12,
    param_shapes,
    read_rank,
)
