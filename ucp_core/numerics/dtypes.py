"""Names of dtypes, without numpy."""

#: Dtypes that ``cast`` knows, by safetensors' names.
FLOATS = ("F64", "F32", "F16", "BF16")
#: Dtypes that hold every value of a smaller one.
WIDER = {"BF16": ("F32", "F64"), "F16": ("F32", "F64"), "F32": ("F64",)}
