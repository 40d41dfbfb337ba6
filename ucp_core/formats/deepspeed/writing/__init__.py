"""Parts of the writers of DeepSpeed's checkpoints.

``model`` makes the state to write. ``partitions``, ``spread`` and ``universal_info`` divide it over
ranks and files. ``trees`` makes the content of each file and writes it, and ``streams`` reads its
bytes.
"""

from ucp_core.formats.deepspeed.writing.model import Group, Model, describe, require_groups, sharded
from ucp_core.formats.deepspeed.writing.spread import (
    ExpertShares,
    Pipeline,
    is_expert,
    with_single_experts,
)
from ucp_core.formats.deepspeed.writing.streams import FlatReader
from ucp_core.formats.deepspeed.writing.trees import (
    DS_VERSION,
    ZERO3,
    Trees,
    hyper_parameters,
    number,
    write_files,
)
from ucp_core.formats.deepspeed.writing.universal_info import universal_info
