"""Keys and names in DeepSpeed's files, and what the reader does with each. Pure.

Sources: ``engine._common_checkpoint_state`` and ``state_dict`` of ZeRO's stages, 0.14 to 0.19.
"""

import re

from ucp_core.manifest import Item

_TENSORS = "its tensors, or their places"
_LAYOUT = "describes the layout it was saved under"

#: Keys of model files that DeepSpeed itself writes.
MODEL = {
    "module": Item("reshard", _TENSORS),
    "optimizer": Item("reshard", _TENSORS),
    "param_shapes": Item("reshard", _TENSORS),
    "buffer_names": Item("reshard", "roles of its tensors"),
    "frozen_param_shapes": Item("reshard", _TENSORS),
    "frozen_param_fragments": Item("reshard", _TENSORS),
    "shared_params": Item("reshard", "ties of its tensors"),
    "dp_world_size": Item("drop", _LAYOUT),
    "mp_world_size": Item("drop", _LAYOUT),
    "checkpoint_parallel_dimensions": Item("drop", _LAYOUT),
    "universal_checkpoint_info": Item("drop", _LAYOUT),
    "ds_version": Item("replicate", "in source"),
    "num_experts": Item("drop", _LAYOUT),
    "ds_autoep_layers": Item("drop", _LAYOUT),
}
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
#: Objects with a state of their own.
STATES = ("lr_scheduler", "data_sampler", "random_ltd")
#: Keys of model files that the reader keeps under their own name.
NAMED = (*STATES, "ds_config", "sparse_tensor_module_names")
#: Keys of ZeRO's files.
OPTIMIZER = {
    "zero_stage": Item("drop", _LAYOUT),
    "group_paddings": Item("drop", _LAYOUT),
    "param_alignment_paddings": Item("drop", _LAYOUT),
    "partition_count": Item("drop", _LAYOUT),
    "ds_zero_partition_groups": Item("drop", _LAYOUT),
    "universal_checkpoint_info": Item("drop", _LAYOUT),
    "ds_version": Item("replicate", "in source"),
}
#: A layer of experts numbers them from 0 on each expert-parallel rank.
EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
