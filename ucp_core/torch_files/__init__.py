"""Read and write torch files without torch; nothing in them is executed.

A torch file (``torch_reader``, ``torch_writer``) is a zip (``zip_reader``, ``zip_writer``) with a
pickle (``pickle_reader``, ``pickle_writer``). A pickle holds names of classes (``pickle_classes``),
tensors (``pickle_tensors``), arrays of numpy (``pickle_arrays``) and small values, which become
JSON (``pickle_values``). A ``budget`` limits the memory of a conversion.
"""

from ucp_core.torch_files.budget import current_budget, reading_within, use_budget
from ucp_core.torch_files.pickle_classes import Global, Opaque, expect
from ucp_core.torch_files.pickle_reader import collector_paused, read_pickle
from ucp_core.torch_files.pickle_tensors import DTYPE_NAMES, TensorRef, extents_of, known_dtype
from ucp_core.torch_files.pickle_values import as_json
from ucp_core.torch_files.pickle_writer import Instance, Named, Size, TensorData, pickle_tree
from ucp_core.torch_files.torch_reader import (
    EDGE_BYTES,
    TensorFiles,
    TorchFile,
    read_torch_file,
    read_torch_part,
)
from ucp_core.torch_files.torch_writer import torch_file_chunks, write_torch_file
