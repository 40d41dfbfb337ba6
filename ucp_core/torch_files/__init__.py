"""Read and write torch files without torch; nothing in them is executed.

A torch file (``torch_reader``, ``torch_writer``) is a zip (``zip_reader``, ``zip_writer``) with a
pickle (``pickle_reader``, ``pickle_writer``). A pickle holds names of classes (``pickle_classes``),
tensors (``pickle_tensors``), arrays of numpy (``pickle_arrays``) and small values, which become
JSON (``pickle_values``). A ``budget`` limits the memory of a conversion.
"""

from ucp_core.torch_files.budget import current_budget, reading_within, use_budget
from ucp_core.torch_files.pickle_classes import Global
from ucp_core.torch_files.pickle_reader import collector_paused
from ucp_core.torch_files.pickle_tensors import extents_of, known_dtype
from ucp_core.torch_files.pickle_writer import pickle_tree
from ucp_core.torch_files.torch_reader import (
    EDGE_BYTES,
    Opaque,
    TensorFiles,
    TensorRef,
    TorchFile,
    as_json,
    read_pickle,
    read_torch_file,
    read_torch_part,
)
from ucp_core.torch_files.torch_writer import (
    Instance,
    Named,
    Size,
    TensorData,
    torch_file_chunks,
    write_torch_file,
)
