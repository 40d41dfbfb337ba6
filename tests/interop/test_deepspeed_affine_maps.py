"""DeepSpeed's own affine maps, read as patterns, give back the tensors that DeepSpeed cut."""

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.shards import assembled, random_array
from ucp_core.geometry import Fragment, TensorKey
from ucp_core.language import extract, parse_affine_map, place, union

pytestmark = pytest.mark.interop

KEY = TensorKey("w", "weight")


@pytest.fixture(scope="module")
def affine() -> ModuleType:
    """Return the one file of DeepSpeed that is needed: the package takes seconds to import."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:
        pytest.skip("deepspeed is not installed")
    path = Path(found.origin).parent / "checkpoint" / "affine.py"
    if not path.exists():
        pytest.skip("this deepspeed has no affine maps")
    spec = importlib.util.spec_from_file_location("deepspeed_affine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _widths(rng: random.Random, tp: int) -> list[int]:
    return [rng.randint(0, 4) for _ in range(tp)]


def _random_map(affine: ModuleType, rng: random.Random, tp: int) -> Any:
    """Return a map by one of DeepSpeed's builders: AutoTP, fused parts, bigcode, Yuan."""
    kind = rng.choice(("replicated", "split", "parts", "segments", "blocks"))
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    dim = rng.randrange(len(shape))
    if kind == "replicated":
        return affine.replicated_map(shape, tp)
    if kind == "split":
        widths = _widths(rng, tp)
        shape[dim] = sum(widths)
        return affine.contiguous_split_map(shape, widths, dim)
    if kind == "blocks":
        size, blocks = rng.randint(1, 3), list(range(rng.randint(tp, 8)))
        shape[dim] = size * len(blocks)
        rng.shuffle(blocks)
        held = {rank: sorted(blocks[rank::tp]) for rank in range(tp)}
        return affine.block_gather_map(shape, held, size, dim)
    split = [_widths(rng, tp) for _ in range(rng.randint(1, 3))]
    if kind == "parts":
        shape[dim] = sum(map(sum, split))
        return affine.sub_param_map(shape, [sum(w) for w in split], split, dim)
    segments = [(sum(widths), False) for widths in split]
    segments.insert(rng.randint(0, len(segments)), (rng.randint(1, 4), True))
    shape[dim] = sum(size for size, _ in segments)
    return affine.segmented_map(shape, segments, dim, tp, split)


@given(seed=st.integers(0, 2**32), tp=st.integers(1, 4))
def test_tensors_cut_by_its_maps_come_back(affine: ModuleType, seed: int, tp: int) -> None:
    """The map goes through JSON as it goes through a checkpoint: ranks become texts or stay."""
    rng = random.Random(seed)
    theirs = _random_map(affine, rng, tp)
    whole = random_array(rng, theirs.logical_shape)
    document = {"version": affine.AFFINE_MAP_FORMAT_VERSION, "params": {"w": theirs.to_dict()}}
    if rng.random() < 0.5:
        document = json.loads(json.dumps(document))

    pattern = parse_affine_map(document, where="model_states")["w"]
    placement = place(pattern, pattern.shards)
    files: dict[str, bytes] = {}
    fragments: list[Fragment] = []
    for rank in range(tp):
        files[str(rank)] = theirs.extract(torch.from_numpy(whole), rank).numpy().tobytes()
        fragments += extract(KEY, "I32", placement, rank, file=str(rank), offset_bytes=0)

    entry = union(KEY, "I32", placement, fragments)
    assert np.array_equal(assembled(entry.shape, list(entry.fragments), files), whole)
    for fragment in entry.fragments:
        alone = [fragment._replace(replica=False)]
        found = assembled(entry.shape, alone, files)[tuple(map(slice, *fragment.box))]
        assert np.array_equal(found, whole[tuple(map(slice, *fragment.box))])
