"""What writers of other frameworks' formats ask about a checkpoint."""

from ucp_core.geometry import TensorEntry, TensorKey
from ucp_core.native import Checkpoint


def tensors_of(checkpoint: Checkpoint) -> dict[TensorKey, TensorEntry]:
    """Return the tensors of the model and its optimizer, sorted: all without the role ``extra``."""
    roles = checkpoint.manifest.roles
    entries = sorted(checkpoint.state_map.entries.items())
    return {key: entry for key, entry in entries if roles.get(key.fqn) != "extra"}


def weights_of(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Return the parameters and buffers by name, sorted."""
    return {k.fqn: entry for k, entry in tensors_of(checkpoint).items() if k.slot == "weight"}
