"""Parts of the writers of DeepSpeed's checkpoints.

The state to write (``model``, ``fused_experts``), its spread over ranks and files (``partitions``,
``pipeline``, ``experts``, ``universal_info``), what each file holds (``trees``), its bytes as
streams (``streams``), and how files come into a store (``output``).
"""

from ucp_core.formats.deepspeed.writing.experts import Experts, is_expert
from ucp_core.formats.deepspeed.writing.fused_experts import with_single_experts
from ucp_core.formats.deepspeed.writing.model import Group, Model, describe
from ucp_core.formats.deepspeed.writing.output import Output
from ucp_core.formats.deepspeed.writing.pipeline import Pipeline
from ucp_core.formats.deepspeed.writing.streams import FlatReader, Range
from ucp_core.formats.deepspeed.writing.trees import DS_VERSION, Trees, hyper_parameters, number
from ucp_core.formats.deepspeed.writing.universal_info import universal_info
