"""Recognises Hugging Face folders and single files of weights by their names."""

from ucp_core.storage import Store

NAME = "huggingface"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
TORCH_NAME = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
#: Suffixes of files that may be a state dict.
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_MANIFEST_NAME = "manifest.json"


def recognise(store: Store, directory: str) -> bool:
    """Return whether ``directory`` is a file or folder of weights, but not everstep's own."""
    if directory.endswith(SUFFIX) or is_torch_file(store, directory):
        return True
    names = store.list(directory)
    has_torch = not {TORCH_NAME, TORCH_INDEX}.isdisjoint(names)
    has_weights = has_torch or any(n.endswith((SUFFIX, INDEX_SUFFIX)) for n in names)
    return has_weights and _MANIFEST_NAME not in names


def is_torch_file(store: Store, path: str) -> bool:
    """Return whether ``path`` is a file that torch may have written."""
    return path.endswith(_TORCH_SUFFIXES) and store.exists(path)
