"""Parts that several formats share, most of them with a file for each rank.

``torch_files`` opens the files of all ranks. ``shards`` joins shards to whole tensors, and
``assembly`` makes a checkpoint of everything that a reader finds. ``values`` converts small values
of pickles to JSON and back, and serves numbers as files. ``optimizer_order`` finds the parameter
for a number in an optimizer. ``flat_buffers`` finds parameters in Megatron's flat buffers, and
checks masters. ``contents`` answers the questions of writers.
"""

from ucp_core.formats.shared.assembly import Assembly
from ucp_core.formats.shared.contents import (
    check_equal_shares,
    stacked_experts,
    tensors_of,
    weights_of,
)
from ucp_core.formats.shared.flat_buffers import Buffer, Param, Place, is_master_of, lay_out
from ucp_core.formats.shared.optimizer_order import (
    assign,
    check_master,
    shapes_by_group,
    unclear,
)
from ucp_core.formats.shared.shards import Layouts, Rank, Shards
from ucp_core.formats.shared.torch_files import Files, in_parallel
from ucp_core.formats.shared.values import (
    NUMBER_DTYPES,
    json_value,
    number_of,
    refusing_nonsense,
    restored,
    whole_tensor,
)
from ucp_core.formats.shared.vocabulary import arguments_of, tells_padding, vocabulary_of
