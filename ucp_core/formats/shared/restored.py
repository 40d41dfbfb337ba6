"""Converts small values of a checkpoint back from JSON."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

from ucp_core.formats.shared.values import bytes_of_number
from ucp_core.torch_files import TensorData


def restored(value: Any) -> Any:
    """Return a value of ``extra`` as it was before ``json_value``, if that was exact."""
    match value:
        case list():
            return [restored(item) for item in value]
        case {"dtype": str(dtype), "shape": list(shape), "base64": str(text), **rest} if not rest:
            return TensorData.of_bytes(dtype, tuple(shape), b64decode(text))
        case {"dtype": str(dtype), "shape": [], "value": number, **rest} if not rest:
            return TensorData.of_bytes(dtype, (), bytes_of_number(number, dtype))
        case {"base64": str(text), **rest} if not rest:
            return b64decode(text)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(map(restored, items))
        case {"dict": list(pairs), **rest} if not rest:
            return {key: restored(item) for key, item in pairs}
        case {"float": "inf" | "-inf" | "nan" as text, **rest} if not rest:
            return float(text)
        case dict():
            return {key: restored(item) for key, item in value.items()}
        case _:
            return value
