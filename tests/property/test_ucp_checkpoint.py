"""Any sharding to any other, bit for bit; any damage found; any crash survived."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import (
    ROOT,
    State,
    assert_loaded,
    empty_tensors,
    random_sharding,
    random_state,
    save,
    small_state,
)
from ucp_core.conversion import convert
from ucp_core.conversion import job as conversion
from ucp_core.conversion import outputs as files
from ucp_core.conversion import work_items as work
from ucp_core.inspection import verify
from ucp_core.manifest import from_bytes, to_bytes, to_json
from ucp_core.manifest.document import parse
from ucp_core.native import Checkpoint, LocalTensor, load, open_checkpoint, try_commit
from ucp_core.native import saving as _save
from ucp_core.storage import MemoryStore

SEEDS = st.integers(0, 2**32)
DIRECTORY = f"{ROOT}/step-00000007"


@pytest.fixture(params=[16, 1 << 20], ids=["tiny blocks", "real blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 bytes make small tensors meet every case of large ones."""
    for module in (_save, conversion, work, files):
        monkeypatch.setattr(module, "BLOCK_BYTES", request.param)


@pytest.mark.usefixtures("_blocks")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=SEEDS, saved_by=st.integers(1, 5), loaded_by=st.integers(1, 5))
def test_any_sharding_loads_from_any_other(seed: int, saved_by: int, loaded_by: int) -> None:
    """Rows, columns, grids and flat ranges, in native form and materialised."""
    rng = random.Random(seed)
    state = random_state(rng)
    store = MemoryStore()
    sharding = random_sharding(rng, state, saved_by)
    results = save(store, state, step=7, world_size=saved_by, sharding=sharding)
    assert [result.committed for result in results] == [False] * (saved_by - 1) + [True]
    native = open_checkpoint(store, DIRECTORY)
    convert(native, store, "universal", memory_bytes=8 << 20, progress=None, processes=1)

    target = random_sharding(rng, state, loaded_by)
    for source in (native, open_checkpoint(store, "universal")):
        assert verify(source) == []
        assert source.extra == {"cursor": {"step": 7}}
        assert (source.step, source.attempt) == (7, 1)
        for held in target:
            need = empty_tensors(state, held)
            assert_loaded_after(source, need, state)


def assert_loaded_after(source: Checkpoint, need: list[LocalTensor], state: State) -> None:
    result = load(source, need)
    assert_loaded(state, need)
    assert result.size_bytes == sum(len(tensor.data) for tensor in need)
    assert result.read_bytes >= result.size_bytes


@settings(deadline=None)
@given(seed=SEEDS, world_size=st.integers(1, 4))
def test_a_manifest_is_what_was_printed(seed: int, world_size: int) -> None:
    """parse(print(x)) == x, for manifests of both kinds and for rank records."""
    rng = random.Random(seed)
    state = random_state(rng)
    store = MemoryStore()
    save(store, state, step=7, world_size=world_size)
    convert(open_checkpoint(store, DIRECTORY), store, "u", memory_bytes=8 << 20, processes=1)

    for path in (f"{DIRECTORY}/manifest.json", f"{DIRECTORY}/a0001-r00000.json", "u/manifest.json"):
        manifest = from_bytes(store.read(path))
        assert parse(to_json(manifest)) == manifest
        assert to_bytes(manifest) == store.read(path)


@settings(deadline=None)
@given(seed=SEEDS, world_size=st.integers(1, 4))
def test_ranks_may_save_in_any_order_and_any_process_may_commit(seed: int, world_size: int) -> None:
    """The manifest is the same whoever writes it, and a rank that lost its commit gets it."""
    state = small_state(seed)
    order = list(range(world_size))
    random.Random(seed).shuffle(order)
    one, two = MemoryStore(), MemoryStore()
    save(one, state, step=7, world_size=world_size, ranks=order)
    save(two, state, step=7, world_size=world_size)
    data = two.read(f"{DIRECTORY}/manifest.json")
    assert one.read(f"{DIRECTORY}/manifest.json") == data

    two.delete(f"{DIRECTORY}/manifest.json")
    assert try_commit(two, DIRECTORY, step=7, attempt=1, world_size=world_size)
    assert two.read(f"{DIRECTORY}/manifest.json") == data
    assert json.loads(data)["format"] == "everstep-distributed"
