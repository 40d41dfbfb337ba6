"""Measures planning at the largest scale of published trainings: arithmetic, no files.

    python -m tests.benchmarks planning --ranks 1 2 4 8 --json

Llama 3.1 405B with fp32 weights and two Adam slots, saved by 1,024 ranks (dp_shard 32 x tp 8 x
pp 4), loaded by 512 (dp_shard 16 x tp 16 x pp 2). The map is made tensor by tensor as it is asked
for, as a reader of many records would do, so the memory is that of the plan.

``--open`` also reads the manifest of all ranks (200 MB) and plans from it for one rank; ``text_s``
is the time to read it value by value. That takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from ucp_core.geometry import Box, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.layout import ParallelLayout
from ucp_core.manifest import FileEntry, Kind, Manifest, from_bytes, to_bytes
from ucp_core.manifest.document import parse
from ucp_core.reading import Part, ReadPlan, plan

SAVED = ParallelLayout(pp=4, dp_shard=32, tp=8)
LOADED = ParallelLayout(pp=2, dp_shard=16, tp=16)
SLOTS = ("weight", "exp_avg", "exp_avg_sq")
BLOCK_BYTES = 1 << 20

LAYERS, MODEL, HIDDEN, KEYS, VOCABULARY = 126, 16384, 53248, 1024, 128256


class Tensor(NamedTuple):
    """A parameter: its shape, the dim that tensor parallelism cuts, and its layer."""

    fqn: str
    shape: tuple[int, ...]
    cut: int | None
    layer: int


def llama() -> list[Tensor]:
    """Return the parameters of Llama 3.1 405B."""
    found = [Tensor("model.embed_tokens.weight", (VOCABULARY, MODEL), 0, 0)]
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": ((MODEL, MODEL), 0),
            "self_attn.k_proj": ((KEYS, MODEL), 0),
            "self_attn.v_proj": ((KEYS, MODEL), 0),
            "self_attn.o_proj": ((MODEL, MODEL), 1),
            "mlp.gate_proj": ((HIDDEN, MODEL), 0),
            "mlp.up_proj": ((HIDDEN, MODEL), 0),
            "mlp.down_proj": ((MODEL, HIDDEN), 1),
            "input_layernorm": ((MODEL,), None),
            "post_attention_layernorm": ((MODEL,), None),
        }
        for name, (shape, cut) in shapes.items():
            found.append(Tensor(f"model.layers.{layer}.{name}.weight", shape, cut, layer))
    found.append(Tensor("model.norm.weight", (MODEL,), None, LAYERS - 1))
    found.append(Tensor("lm_head.weight", (VOCABULARY, MODEL), 0, LAYERS - 1))
    return found


def box_of(tensor: Tensor, layout: ParallelLayout, dp: int, tp: int) -> Box:
    """Return what FSDP2 over tensor parallelism leaves to one rank."""
    box = Box.full(tensor.shape)
    if tensor.cut is not None:
        box = box.piece(tensor.cut, tp, layout.tp)
    return box.piece(0, dp, layout.dp_shard)


@lru_cache
def boxes_of(shape: tuple[int, ...], cut: int | None, layout: ParallelLayout) -> list[Placed]:
    """Return the boxes of a tensor in order, and where each is on the axes dp_shard and tp."""
    tensor = Tensor("", shape, cut, 0)
    return sorted(
        Placed(box_of(tensor, layout, dp, tp), dp, tp)
        for dp in range(layout.dp_shard)
        for tp in range(layout.tp if cut is not None else 1)
    )


class Placed(NamedTuple):
    """A box and who holds it."""

    box: Box
    dp: int
    tp: int


class Saved(Mapping[TensorKey, TensorEntry]):
    """The tensors of the checkpoint, each with its fragments when it is asked for.

    Attributes:
        seconds: CPU time that making them took, which is not planning.
    """

    def __init__(self, tensors: list[Tensor], layout: ParallelLayout) -> None:
        self._tensors = {TensorKey(t.fqn, slot): t for t in tensors for slot in SLOTS}
        self._layout = layout
        self._offsets = self._places()
        self.seconds = 0.0

    def _places(self) -> dict[TensorKey, tuple[int, int]]:
        """Return where a tensor begins in the file of a rank with tp 0, and in that of others.

        Every extent divides evenly, so all ranks of a stage have the same.
        """
        found: dict[TensorKey, tuple[int, int]] = {}
        ends: dict[int, tuple[int, int]] = {}
        for key, tensor in self._tensors.items():
            stage = self._stage(tensor)
            first, other = ends.get(stage, (0, 0))
            found[key] = first, other
            size = 4 * box_of(tensor, self._layout, 0, 0).num_elements
            ends[stage] = first + size, other + (0 if tensor.cut is None else size)
        return found

    def _stage(self, tensor: Tensor) -> int:
        return tensor.layer * self._layout.pp // LAYERS

    def __getitem__(self, key: TensorKey) -> TensorEntry:
        begun = time.process_time()
        tensor, layout = self._tensors[key], self._layout
        first = self._stage(tensor) * (layout.dp_shard * layout.tp)
        fragments: list[Fragment] = []
        for box, dp, tp in boxes_of(tensor.shape, tensor.cut, layout):
            rank = first + dp * layout.tp + tp
            size = 4 * box.num_elements
            # With as many digits as most numbers have.
            crc32 = (1 << 32) - 1 - rank
            blocks = tuple(range(crc32, crc32 - -(-size // BLOCK_BYTES), -1))
            offset = self._offsets[key][tp > 0]
            fragments.append(Fragment(box, f"a0001-r{rank:05d}.bin", offset, size, crc32, blocks))
        self.seconds += time.process_time() - begun
        return TensorEntry(key=key, dtype="F32", shape=tensor.shape, fragments=tuple(fragments))

    def get(  # type: ignore[override]
        self, key: TensorKey, default: TensorEntry | None = None
    ) -> TensorEntry | None:
        """Return a tensor, if there is one."""
        return self[key] if key in self._tensors else default

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[TensorKey]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def needed(tensors: list[Tensor], layout: ParallelLayout, rank: int) -> list[Part]:
    """Return what one rank of the new layout loads."""
    place = layout.coordinates(rank)
    return [
        Part(TensorKey(t.fqn, slot), "F32", t.shape, box)
        for t in tensors
        if t.layer * layout.pp // LAYERS == place["pp"]
        for box in [box_of(t, layout, place["dp_shard"], place["tp"])]
        for slot in SLOTS
    ]


def planned(num_ranks: int) -> tuple[ReadPlan, float]:
    """Plan for ``num_ranks`` ranks spread over the new layout.

    Returns:
        The plan of the last one, and the CPU time of all without that of making the map.
    """
    tensors = llama()
    saved = Saved(tensors, SAVED)
    have = StateMap(entries=saved, block_bytes=BLOCK_BYTES)
    begun = time.process_time()
    for number in range(num_ranks):
        rank = number * (LOADED.world_size // num_ranks)
        made = plan(
            needed(tensors, LOADED, rank), [have], span_bytes_max=32 << 20, direct_bytes_max=2 << 20
        )
    return made, time.process_time() - begun - saved.seconds


def measure(num_ranks: int) -> dict[str, float]:
    """Return CPU time and size of the plans of ``num_ranks`` ranks."""
    made, seconds = planned(num_ranks)
    return {
        "ranks": num_ranks,
        "seconds": round(seconds, 3),
        "seconds_per_rank": round(seconds / num_ranks, 3),
        "copies_of_one": len(made.copies),
        "needed_gb_of_one": round(made.needed_bytes / 1e9, 2),
        "read_ratio": round(made.read_bytes / made.needed_bytes, 4),
    }


def manifest_text() -> bytes:
    """Return the manifest of the saved checkpoint as it is stored."""
    entries = Saved(llama(), SAVED)
    sizes: dict[str, int] = {}
    for entry in entries.values():
        for fragment in entry.fragments:
            stop = fragment.offset_bytes + fragment.num_bytes
            sizes[fragment.file] = max(sizes.get(fragment.file, 0), stop)
    return to_bytes(
        Manifest(
            kind=Kind.DISTRIBUTED,
            step=1,
            attempt=1,
            state_map=StateMap(entries=entries, block_bytes=BLOCK_BYTES),
            files={name: FileEntry(num_bytes=size, crc32=0) for name, size in sizes.items()},
            world_size=SAVED.world_size,
        )
    )


def opened() -> dict[str, float]:
    """Return what one rank pays for reading the manifest and planning."""
    data = manifest_text()
    tracemalloc.start()
    from_bytes(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    begun = time.process_time()
    manifest = from_bytes(data)
    read = time.process_time()
    made = plan(
        needed(llama(), LOADED, 0),
        [manifest.state_map],
        span_bytes_max=32 << 20,
        direct_bytes_max=2 << 20,
    )
    planned = time.process_time()
    assert made.needed_bytes
    parse(json.loads(data))
    return {
        "manifest_mb": round(len(data) / 1e6, 1),
        "read_s": round(read - begun, 3),
        "plan_s": round(planned - read, 3),
        "text_s": round(time.process_time() - planned, 3),
        "peak_mb": round(peak_bytes / 1e6, 1),
    }


def peak_mb() -> float:
    """Return the memory that planning for one rank takes at most, its plan included."""
    tracemalloc.start()
    planned(1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(peak_bytes / 1e6, 1)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--open", action="store_true", help="read a manifest of all ranks, too")
    options = parser.parse_args()
    if options.open:
        print(json.dumps(opened()))
        return
    results = [measure(num_ranks) for num_ranks in options.ranks]
    peak = peak_mb()
    if options.json:
        print(json.dumps({"plans": results, "peak_mb_of_one": peak}, indent=1))
        return
    num_bytes = sum(4 * len(SLOTS) * Box.full(t.shape).num_elements for t in llama())
    print(f"{num_bytes / 1e12:.2f} TB in {len(llama()) * len(SLOTS)} tensors, {SAVED} -> {LOADED}")
    print(f"memory for one rank: {peak} MB")
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
