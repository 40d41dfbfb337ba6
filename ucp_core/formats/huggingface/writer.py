"""Writes the weights of any checkpoint as safetensors that the Hugging Face tools load.

It does not write the optimizer's slots. It writes the index, or the only file, last; that commits
the export.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

from ucp_core.errors import UcpError
from ucp_core.formats.huggingface.reader import EXTRA_NAME
from ucp_core.formats.huggingface.recognition import INDEX_SUFFIX, SUFFIX
from ucp_core.formats.safetensors_header import print_header
from ucp_core.formats.shared import weights_of
from ucp_core.geometry import DTYPE_BYTES, TensorEntry
from ucp_core.native import Checkpoint, check_memory, refuse_taken, stream
from ucp_core.numerics import FLOATS, cast, grouped, shortened
from ucp_core.storage import Buffer, Store, join, undone
from ucp_core.torch_files import DTYPE_NAMES

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
    lists = ["_keep_in_fp32_modules_strict"]
    lists += ["_keep_in_fp32_modules"] if dtype == "F16" else []
    kept: list[str] = []
    reasons: list[str] = []

    def keep(names: Iterable[str], why: str) -> None:
        own = [name for name in names if name not in kept]
        kept.extend(own)
        reasons.extend([f"{shortened(own, _TOLD)} stay float32 ({why})"] if own else [])

    keep((name for name in wide if roles.get(name) == "buffer"), "buffers")
    documents = checkpoint.extra.get(EXTRA_NAME, {})
    config = documents.get("config.json") if isinstance(documents, dict) else None
    for kind in _classes(config) if isinstance(config, dict) else ():
        if isinstance(kind, str):
            told = (
                f"transformers is not installed, or has no {kind}: which other tensors that "
                "model keeps"
            )
            reasons.append(f"{told} in float32 is unknown, and was cast")
            continue
        # ``transformers`` (5.24) searches them in names when it loads.
        globs = [glob for name in lists for glob in getattr(kind, name, None) or ()]
        patterns = [re.compile(glob.replace("*", ".*")) for glob in globs]
        own = (name for name in wide if any(one.search(name) for one in patterns))
        keep(own, f"{kind.__name__} keeps them in float32")
    return Kept(frozenset(kept), tuple(reasons))


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


#: The default size of the Hugging Face tools.
SHARD_BYTES = 5_000_000_000
#: Usual names of dtypes.
DTYPES = {"fp32": "F32", "float32": "F32", "fp16": "F16", "float16": "F16"}
DTYPES |= {"bf16": "BF16", "bfloat16": "BF16"}

_CONFIG_KEYS = ("dtype", "torch_dtype")
#: LoRA of ``peft`` (0.21): its names in the model, and its files.
_ADAPTER = re.compile(r"(?P<module>.*)\.(?P<kind>lora_\w+)\.default(?P<end>(?:\.\w+)?)")
_ADAPTER_CONFIG, _ADAPTER_NAME = "adapter_config.json", f"adapter_model{SUFFIX}"
#: Number of elements to cast at a time: source and result stay in the second-level cache.
_CAST_ELEMENTS = 1 << 16


class _Output(NamedTuple):
    """A tensor to write: its name, its entry, its dtype."""

    name: str
    entry: TensorEntry
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes // DTYPE_BYTES[self.entry.dtype] * DTYPE_BYTES[self.dtype]


def write(  # noqa: PLR0913 - the options of a format
    checkpoint: Checkpoint,
    store: Store,
    directory: str,
    *,
    memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    keep_tied: bool = False,
    fsync: bool = True,
) -> None:
    """Write the weights, frozen parameters and buffers to ``directory``.

    See ``export`` for the other arguments and the errors.

    Args:
        dtype: A key of ``DTYPES``: every float tensor of 2 bytes or more is cast to it, rounded to
            nearest, except those of ``kept_in_float32``. None: each keeps its own dtype.
        shard_bytes: Most bytes of a file; a larger tensor has a file of its own.
        keep_tied: Also write every alias of a tied tensor, for tools that do not tie.
    """
    check_memory(memory_bytes)
    target = dtype_of(dtype)
    if shard_bytes < 1:
        raise UcpError(f"shard_bytes={shard_bytes} is not a size")
    outputs = _outputs(checkpoint, target, keep_tied=keep_tied)
    names = store.list(directory)
    refuse_taken(directory, (name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX))))
    checkpoint.state_map.prove_coverage()
    documents = _documents(checkpoint, outputs, target)
    adapters = _adapters(outputs) if _ADAPTER_CONFIG in documents else []
    cut = list(grouped(outputs, lambda output: output.num_bytes, shard_bytes))
    form = f"model-{{:05d}}-of-{len(cut):05d}{SUFFIX}" if len(cut) > 1 else f"model{SUFFIX}"
    shards = {form.format(number): shard for number, shard in enumerate(cut, start=1)}
    # A tool that ignores the index would take half a model for a whole one.
    with undone(store, directory) as written:
        for name, document in documents.items():
            path = join(directory, name)
            if not store.exists(path):
                written.append(path)
                store.write_atomic(path, _print(document), fsync=fsync)
        total_bytes = sum(output.entry.num_bytes for output in (*outputs, *adapters))
        writer = _WeightFiles(checkpoint, memory_bytes, progress, total_bytes)
        for name, shard in ({_ADAPTER_NAME: adapters} | shards if adapters else shards).items():
            written.append(join(directory, name))
            store.write_file(written[-1], writer.chunks(shard), fsync=fsync)
        if len(shards) > 1:
            written.append(join(directory, f"model{INDEX_SUFFIX}"))
            store.write_atomic(written[-1], _print(_index(shards)), fsync=fsync)


def dtype_of(dtype: str | None) -> str | None:
    """Return the dtype that has a usual name."""
    if dtype is None:
        return None
    if dtype.lower() not in DTYPES:
        raise UcpError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    return DTYPES[dtype.lower()]


def _outputs(checkpoint: Checkpoint, target: str | None, *, keep_tied: bool) -> list[_Output]:
    kept = kept_in_float32(checkpoint, target).names

    def dtype(entry: TensorEntry) -> str:
        is_cast = entry.dtype in FLOATS and entry.key.fqn not in kept
        return target if target and is_cast else entry.dtype

    found = [_Output(name, one, dtype(one)) for name, one in weights_of(checkpoint).items()]
    if not found:
        raise UcpError(
            f"{checkpoint.directory} has no weights to export", path=checkpoint.directory
        )
    if keep_tied:
        by_name = {output.name: output for output in found}
        found += [
            by_name[owner]._replace(name=alias)
            for alias, owner in checkpoint.manifest.ties.items()
            if owner in by_name and alias not in by_name
        ]
    if any(output.name == "__metadata__" for output in found):
        raise UcpError("a safetensors file cannot hold a tensor named '__metadata__': rename it")
    return sorted(found, key=lambda output: output.name)


def _adapters(outputs: Sequence[_Output]) -> list[_Output]:
    """Return the adapters again, under the names that ``peft`` gives them in a file."""
    found: list[_Output] = []
    for output in outputs:
        match = _ADAPTER.fullmatch(output.name)
        if match:
            end = "" if match["kind"] == "lora_magnitude_vector" else match["end"]
            name = f"base_model.model.{match['module']}.{match['kind']}{end}"
            found.append(output._replace(name=name))
    return found


def _index(shards: Mapping[str, Sequence[_Output]]) -> dict[str, Any]:
    files = {output.name: file for file, shard in shards.items() for output in shard}
    total = sum(output.num_bytes for shard in shards.values() for output in shard)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}


def _documents(
    checkpoint: Checkpoint, outputs: Sequence[_Output], target: str | None
) -> dict[str, Any]:
    """Return the documents that the checkpoint kept from a Hugging Face folder.

    The configuration names the dtype of the weights, because transformers casts to it on loading.
    """
    documents = checkpoint.extra.get(EXTRA_NAME, {})
    if not isinstance(documents, dict):
        return {}
    documents = {n: d for n, d in documents.items() if n.endswith(".json") and "/" not in n}
    floats = {target} if target else {o.dtype for o in outputs if o.dtype in FLOATS}
    config = documents.get("config.json")
    if isinstance(config, dict) and len(floats) == 1:
        (dtype,) = floats
        changed = {key: DTYPE_NAMES[dtype] for key in _CONFIG_KEYS if key in config}
        documents["config.json"] = config | changed
    return documents


def _print(document: Any) -> bytes:
    return json.dumps(document, indent=2, allow_nan=False).encode() + b"\n"


@dataclass(slots=True)
class _WeightFiles:
    checkpoint: Checkpoint
    memory_bytes: int
    progress: Callable[[int, int], None] | None
    total_bytes: int
    done_bytes: int = 0

    def chunks(self, shard: Sequence[_Output]) -> Iterator[Buffer]:
        """Yield one file, in an order that aligns each tensor without gaps."""
        shard = sorted(shard, key=lambda output: (-DTYPE_BYTES[output.dtype], output.name))
        names = {output.name for output in shard}
        metadata = {"format": "pt"} | {
            alias: owner
            for alias, owner in self.checkpoint.manifest.ties.items()
            if owner in names and alias not in names
        }
        yield print_header([(o.name, o.dtype, o.entry.shape) for o in shard], metadata)
        dtypes = {output.entry.key: output.dtype for output in shard}
        entries = [output.entry for output in shard]
        for slab in stream(self.checkpoint, entries, memory_bytes=self.memory_bytes):
            entry = slab.piece.entry
            yield from _cast(slab.data, entry.dtype, dtypes[entry.key])
            self.done_bytes += len(slab.data)
            if self.progress is not None:
                self.progress(self.done_bytes, self.total_bytes)


def _cast(data: memoryview, source: str, target: str) -> Iterator[memoryview]:
    if source == target:
        yield data
        return
    step = _CAST_ELEMENTS * DTYPE_BYTES[source]
    for low in range(0, len(data), step):
        yield cast(data[low : low + step], source, target)
