"""Numbers in bytes: checksums, dtypes, casts and sizes. Pure."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door
from ucp_core.numerics.checksums import (
    BLOCK_BYTES,
    NO_SUMS,
    Sums,
    combine,
    combine_blocks,
    crc32,
    joined,
    sums_of,
    sums_of_blocks,
)
from ucp_core.numerics.dtypes import FLOATS, WIDER

if TYPE_CHECKING:
    from ucp_core.numerics.casts import cast, decode, encode, numpy_dtype
    from ucp_core.numerics.sizes import counted, format_bytes, grouped, parse_bytes, shortened


__getattr__ = lazy_door(__name__)
