"""Parts of the writers of DeepSpeed's checkpoints.

``model`` makes the state to write, and reads its bytes. ``spread`` divides it over ranks and files.
``trees`` makes the content of each file and writes it.
"""

from ucp_core.formats.deepspeed.writing.model import (
    FlatReader,
    Group,
    Model,
    describe,
    require_groups,
    sharded,
)
from ucp_core.formats.deepspeed.writing.spread import (
    ExpertShares,
    Pipeline,
    is_expert,
    universal_info,
    with_single_experts,
)
from ucp_core.formats.deepspeed.writing.trees import (
    DS_VERSION,
    ZERO3,
    Trees,
    hyper_parameters,
    number,
    write_files,
)
