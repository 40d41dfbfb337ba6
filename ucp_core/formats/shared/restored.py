"""Converts small values of a checkpoint back from JSON."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any

from ucp_core.geometry import DTYPE_BYTES
from ucp_core.torch_files import TensorData

if TYPE_CHECKING:
    from collections.abc import Collection


def restored(value: Any, dtypes: Collection[str] = frozenset(DTYPE_BYTES)) -> Any:
    """Return a value of ``extra`` with tensors and bytes instead of their base64.

    Args:
        value: The value.
        dtypes: Dtypes to convert; tensors of other dtypes stay JSON.
    """
    if isinstance(value, list):
        return [restored(item, dtypes) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"base64"}:
        return b64decode(value["base64"])
    if value.keys() == {"dtype", "shape", "base64"} and value["dtype"] in dtypes:
        return TensorData.of_bytes(
            value["dtype"], tuple(value["shape"]), b64decode(value["base64"])
        )
    return {key: restored(item, dtypes) for key, item in value.items()}
