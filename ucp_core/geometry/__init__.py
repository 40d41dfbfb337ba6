"""Which elements of which tensor: boxes, and training state as a map of them. Pure."""

from typing import TYPE_CHECKING

from ucp_core.geometry.boxes import (
    Box,
    flat_range,
    is_contiguous,
    is_packed,
    packed_strides,
    reach,
    slabs,
    span,
)
from ucp_core.geometry.statemap import (
    DTYPE_BYTES,
    Extent,
    Fragment,
    StateMap,
    TableTensor,
    TensorEntry,
    TensorKey,
    copies_differ,
    prove_entry,
    sweep_dim,
)
from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.geometry.fragment_table import (
        FILE,
        FIRST_BLOCK,
        NUM_BLOCKS,
        NUM_BYTES,
        OFFSET,
        START,
        STOP,
        Table,
        TableEntries,
        TableTensors,
        columns_of,
        merged,
        without_repeats,
    )
    from ucp_core.geometry.fragment_table import Numbers as Numbers


__getattr__ = lazy_door(__name__)
