"""State that goes out to another format and comes back is the same, and a single bit is noticed."""

import random
from dataclasses import replace
from unittest.mock import patch

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.checkpoints import ROOT, State, random_sharding, random_state, save
from ucp_core.conversion import convert
from ucp_core.formats import open_source
from ucp_core.formats.dcp import writer as dcp_writer
from ucp_core.formats.huggingface import recognition as huggingface
from ucp_core.formats.huggingface import writer as huggingface_writer
from ucp_core.geometry import DTYPE_BYTES, TensorKey
from ucp_core.inspection import diff
from ucp_core.inspection.elements import Tolerance
from ucp_core.native import Checkpoint, open_checkpoint
from ucp_core.storage import MemoryStore

MEMORY = 8 << 20
SEEDS = st.integers(0, 2**32)


def _saved(state: State, rng: random.Random, store: MemoryStore) -> Checkpoint:
    world_size = rng.randint(1, 4)
    sharding = random_sharding(rng, state, world_size)
    save(store, state, step=7, world_size=world_size, sharding=sharding)
    return open_checkpoint(store, f"{ROOT}/step-00000007")


@given(seed=SEEDS, shard_bytes=st.integers(1, 200))
def test_weights_survive_hugging_face(seed: int, shard_bytes: int) -> None:
    """Through any layout, any cut into files, any dtype, and back to a universal checkpoint."""
    rng = random.Random(seed)
    store = MemoryStore()
    source = _saved(random_state(rng), rng, store)
    # Some states hold slots of an optimizer alone, which the writer refuses.
    assume(any(key.slot == "weight" for key in source.state_map.entries))

    huggingface_writer.write(source, store, "hf", memory_bytes=MEMORY, shard_bytes=shard_bytes)

    back = open_source(store, "hf")
    assert back.manifest.source["format"] == huggingface.NAME
    for entry in back.state_map.entries.values():
        # Tools map files and look at elements in place.
        assert entry.fragments[0].offset_bytes % DTYPE_BYTES[entry.dtype] == 0
    assert diff(source, back, slots=["weight"]).equal
    convert(back, store, "universal", memory_bytes=MEMORY, processes=1)
    assert diff(source, open_checkpoint(store, "universal"), slots=["weight"]).equal


@given(seed=SEEDS, flat=st.booleans(), chunk_bytes=st.sampled_from([16, 1 << 20]))
def test_everything_survives_torch_dcp(seed: int, *, flat: bool, chunk_bytes: int) -> None:
    """Slots, groups and small values too; roles are what the reader makes of missing slots."""
    rng = random.Random(seed)
    store = MemoryStore()
    source = _saved(random_state(rng), rng, store)
    names = sorted({key.fqn for key in source.state_map.entries})
    # A folder of torch's without a tensor is refused by name.
    assume(names)
    half = len(names) // 2
    # Flattened, a group is known by the values that its parameters share.
    groups = [
        {"params": names[:half], "lr": 0.1, "betas": [0.9, 0.95], "foreach": None},
        {"params": names[half:], "lr": 0.2, "betas": [0.9, 0.99], "foreach": True},
    ]
    groups = [group for group in groups if group["params"]]
    source = replace(source, manifest=replace(source.manifest, param_groups=groups))

    with patch.object(dcp_writer, "CHUNK_BYTES", chunk_bytes):
        dcp_writer.write(source, store, "dcp", memory_bytes=MEMORY, flatten_optimizer=flat)

    back = open_source(store, "dcp")
    report = diff(source, back)
    assert report.tensors == ()
    assert [value for value in report.values if not value.path.startswith("roles")] == []
    convert(back, store, "universal", memory_bytes=MEMORY, processes=1)
    assert diff(source, open_checkpoint(store, "universal")).tensors == ()


@given(seed=SEEDS)
def test_any_flipped_bit_is_found_where_it_is(seed: int) -> None:
    """Whatever the dtypes, layouts and kinds of checkpoint on either side."""
    rng = random.Random(seed)
    state = random_state(rng)
    filled = [key for key in sorted(state) if state[key].data]
    stores = MemoryStore(), MemoryStore()
    one = _saved(state, rng, stores[0])
    if filled:
        key = rng.choice(filled)
        data = bytearray(state[key].data)
        place = rng.randrange(len(data))
        data[place] ^= 1 << rng.randrange(8)
        state = state | {key: replace(state[key], data=bytes(data))}
    two = _saved(state, rng, stores[1])
    if rng.random() < 0.5:
        convert(two, stores[1], "universal", memory_bytes=MEMORY, processes=1)
        two = open_checkpoint(stores[1], "universal")

    report = diff(one, two, names="", slots={"weight", "exp_avg"}, read_all=rng.random() < 0.5)

    if not filled:
        assert report.equal
        return
    (found,) = report.tensors
    assert TensorKey(found.fqn, found.slot) == key
    assert found.num_different == 1
    assert found.first_index is not None
    flat = 0
    for index, extent in zip(found.first_index, state[key].shape, strict=True):
        flat = flat * extent + index
    assert flat == place // (len(data) // max(1, _num_elements(state[key].shape)))


def _num_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


@given(seed=SEEDS)
def test_a_checkpoint_equals_itself_under_any_options(seed: int) -> None:
    """Random bytes hold every kind of NaN."""
    rng = random.Random(seed)
    state = random_state(rng)
    one, two = (_saved(state, rng, MemoryStore()) for _ in range(2))

    for read_all in (False, True):
        for tolerance in (None, Tolerance(1e-3, 1e-3)):
            report = diff(
                one, two, read_all=read_all, tolerance=tolerance, cast=True, slots=["weight"]
            )
            assert report.equal
