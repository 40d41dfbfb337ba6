"""Reads weights in torch's own files: ``pytorch_model.bin`` of transformers, or a state dict.

DeepSpeed's ``save_16bit_model`` and ``zero_to_fp32.py`` write such files. The reader executes no
code in the pickles. Tensors that share their bytes are tied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.shared import Assembly, Files, whole_tensor
from ucp_core.geometry import TensorKey
from ucp_core.torch_files import TensorRef


def add(found: Assembly, names: Sequence[str], listed: Mapping[str, str]) -> None:
    """Add the tensors of some files, and their ties.

    Args:
        listed: File by tensor, from the index. Empty without an index.
    """
    files = Files(found.store, found.directory)
    files.open(names)
    entries, ties = found.entries, found.ties
    for name in names:
        path = files.path(name)
        owners: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
        for fqn, ref in files.trees[name].items():
            if not isinstance(fqn, str) or not isinstance(ref, TensorRef):
                raise CheckpointCorruptError(
                    f"{path}: {fqn!r} is not a tensor, so the file is not a dict of weights by "
                    "name; if it belongs to a checkpoint, give the checkpoint's folder",
                    path=path,
                )
            if listed.get(fqn, name) != name or TensorKey(fqn, "weight") in entries:
                raise CheckpointCorruptError(
                    f"{path} holds {fqn}, which {listed.get(fqn, 'another file')} holds too: "
                    "files of two models are mixed",
                    path=path,
                    fqn=fqn,
                )
            place = ref.offset_bytes, ref.shape, ref.strides
            owner = owners.setdefault(place, fqn) if ref.num_bytes else fqn
            if owner != fqn:
                ties[fqn] = owner
                continue
            key = TensorKey(fqn, "weight")
            entries[key] = whole_tensor(key, ref)
    missing = sorted(set(listed) - {key.fqn for key in entries} - set(ties))
    if missing:
        path = files.path(listed[missing[0]])
        raise CheckpointCorruptError(
            f"{path} does not hold {missing[0]}, but the index says that it does; the file is "
            "from another save",
            path=path,
            fqn=missing[0],
        )
    found.extents |= files.extents
