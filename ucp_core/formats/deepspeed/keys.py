"""Keys and names in DeepSpeed's files, and what the reader does with each. Pure.

Sources: ``engine._common_checkpoint_state`` and ``state_dict`` of ZeRO's stages, 0.14 to 0.19.
"""

import re

from ucp_core.manifest import Item

_TENSORS = Item("reshard", "its tensors, or their places")
_LAYOUT = Item("drop", "describes the layout it was saved under")
_VERSION = {"ds_version": Item("replicate", "in source")}

#: Keys of model files that DeepSpeed itself writes.
MODEL = {
    **dict.fromkeys(("module", "optimizer", "param_shapes"), _TENSORS),
    **dict.fromkeys(("frozen_param_shapes", "frozen_param_fragments"), _TENSORS),
    "buffer_names": Item("reshard", "roles of its tensors"),
    "shared_params": Item("reshard", "ties of its tensors"),
    **dict.fromkeys(("dp_world_size", "mp_world_size", "universal_checkpoint_info"), _LAYOUT),
    **dict.fromkeys(("checkpoint_parallel_dimensions", "num_experts", "ds_autoep_layers"), _LAYOUT),
    **_VERSION,
}
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
#: Objects with a state of their own.
STATES = ("lr_scheduler", "data_sampler", "random_ltd")
#: Keys of model files that the reader keeps under their own name.
NAMED = (*STATES, "ds_config", "sparse_tensor_module_names")
#: Keys of ZeRO's files.
OPTIMIZER = {
    **dict.fromkeys(("zero_stage", "group_paddings", "param_alignment_paddings"), _LAYOUT),
    **dict.fromkeys(("partition_count", "ds_zero_partition_groups"), _LAYOUT),
    "universal_checkpoint_info": _LAYOUT,
    **_VERSION,
}
#: A layer of experts numbers them from 0 on each expert-parallel rank.
EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
