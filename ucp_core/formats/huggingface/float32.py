"""Finds the tensors that stay float32 in a model of a narrower dtype."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from ucp_core.formats.huggingface.reader import EXTRA_NAME
from ucp_core.native import Checkpoint
from ucp_core.numerics import shortened

_NARROW = ("F16", "BF16")
#: A note names this many tensors and counts the others.
_TOLD = 5


class Kept(NamedTuple):
    """Weights that an export leaves in float32."""

    names: frozenset[str] = frozenset()  #: Their names.
    #: The names and the reason, for people, or why the model's class is unknown.
    reasons: tuple[str, ...] = ()


def kept_in_float32(checkpoint: Checkpoint, dtype: str | None) -> Kept:
    """Return the float32 weights that a cast of the model to ``dtype`` must leave alone.

    These are buffers, such as the bias of a router, and what the model's class of ``transformers``
    says: ``_keep_in_fp32_modules_strict``, and for float16 ``_keep_in_fp32_modules``.
    """
    if dtype not in _NARROW:
        return Kept()
    roles = checkpoint.manifest.roles
    wide = [
        key.fqn
        for key, entry in checkpoint.state_map.entries.items()
        if key.slot == "weight" and entry.dtype == "F32"
    ]
    buffers = [name for name in wide if roles.get(name) == "buffer"]
    reasons = [_told(buffers, "buffers")] if buffers else []
    documents = checkpoint.extra.get(EXTRA_NAME, {})
    config = documents.get("config.json") if isinstance(documents, dict) else None
    found: list[str] = []
    for kind in _classes(config) if isinstance(config, dict) else ():
        if isinstance(kind, str):
            told = (
                f"transformers is not installed, or has no {kind}: which other tensors that "
                "model keeps"
            )
            reasons.append(f"{told} in float32 is unknown, and was cast")
            continue
        patterns = _patterns(kind, dtype)
        own = [name for name in wide if any(one.search(name) for one in patterns)]
        own = [name for name in own if name not in {*buffers, *found}]
        found += own
        reasons += [_told(own, f"{kind.__name__} keeps them in float32")] if own else []
    return Kept(frozenset((*buffers, *found)), tuple(reasons))


def _told(names: list[str], why: str) -> str:
    return f"{shortened(names, _TOLD)} stay float32 ({why})"


def _patterns(kind: Any, dtype: str) -> list[re.Pattern[str]]:
    """Return the expressions that ``transformers`` (5.24) searches in names when it loads."""
    lists = ["_keep_in_fp32_modules_strict"]
    lists += ["_keep_in_fp32_modules"] if dtype == "F16" else []
    globs = [glob for name in lists for glob in getattr(kind, name, None) or ()]
    return [re.compile(glob.replace("*", ".*")) for glob in globs]


def _classes(config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the classes of a model and its parts, or the name of one that is not installed."""
    names = list(config.get("architectures") or ())
    if not names and "model_type" not in config:
        return
    try:
        # The import loads DeepSpeed if it is installed, which logs to the standard output.
        with redirect_stdout(sys.stderr):
            import transformers
            from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
    except ImportError:
        yield from names
        return
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    names += [MODEL_MAPPING_NAMES.get(part.get("model_type")) for part in parts]
    for name in dict.fromkeys(name for name in names if isinstance(name, str)):
        yield getattr(transformers, name, name)
