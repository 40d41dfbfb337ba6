"""Parts of the writers of DeepSpeed's checkpoints.

``model`` makes the state to write. ``partitions``, ``pipeline``, ``experts`` and
``universal_info`` spread it over ranks and files. ``trees`` makes the content of each file,
``streams`` its bytes, and ``output`` puts the files into a store.
"""

from ucp_core.formats.deepspeed.writing.experts import (
    ExpertShares,
    is_expert,
    with_single_experts,
)
from ucp_core.formats.deepspeed.writing.model import Group, Model, describe, require_groups
from ucp_core.formats.deepspeed.writing.output import write_files
from ucp_core.formats.deepspeed.writing.pipeline import Pipeline
from ucp_core.formats.deepspeed.writing.streams import FlatReader, Range
from ucp_core.formats.deepspeed.writing.trees import DS_VERSION, Trees, hyper_parameters, number
from ucp_core.formats.deepspeed.writing.universal_info import universal_info
