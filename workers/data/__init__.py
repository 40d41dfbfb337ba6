"""Turns data into samples, and gives their order and random numbers.

``order`` does not import torch.
"""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.data.dataset import Split, open_texts
    from workers.data.fingerprint import Content, are_alike, content_of
    from workers.data.lines import JsonLines
    from workers.data.loader import DataLoader, Dataset, as_data, micro_batches_of, num_tokens
    from workers.data.order import DataOrder
    from workers.data.packing import pack
    from workers.data.parquet import ParquetRows
    from workers.data.randomness import (
        draw_for_part,
        drawn,
        keeping_host_numbers,
        numbers_of_stage,
        random_seed,
        seed_all,
        seeded,
    )
    from workers.data.stream import KEEPS_ORDER
    from workers.data.text import find_source


__getattr__ = lazy_door(__name__)
