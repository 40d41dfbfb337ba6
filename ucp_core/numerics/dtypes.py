"""Names of dtypes, without numpy."""

from __future__ import annotations

#: Dtypes that ``cast`` knows, by safetensors' names.
FLOATS = ("F64", "F32", "F16", "BF16")
