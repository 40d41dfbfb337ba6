"""Numbers of every dtype in numpy: ``casts`` from one to another, ``floats`` to fp64 and back."""

from __future__ import annotations

#: Dtypes of which there are casts, by safetensors' names.
FLOATS = ("F64", "F32", "F16", "BF16")
