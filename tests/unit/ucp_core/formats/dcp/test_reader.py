"""Checkpoints of torch DCP open as they lie: every chunk a fragment, every key accounted for."""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp_peer
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.support.counting_store import CountingStore
from tests.support.dcp_files import Chunk, Save, random_tensors, rewrite, write
from tests.support.foreign_reading import checkpoint_fixture, loaded, same_bits, unequal
from tests.support.hostile_pickles import Payload
from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ForeignClassError,
    UncoveredRegionError,
    UnsupportedVersionError,
)
from ucp_core.formats import open_source
from ucp_core.formats.dcp import reader as dcp
from ucp_core.formats.dcp.recognition import recognise
from ucp_core.native import Checkpoint
from ucp_core.storage import LocalStore, MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Tiny(nn.Module):
    """Two layers, a buffer, a frozen parameter and a 0-d one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.register_buffer("running_mean", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.inner(x) * self.scale
        return scaled


def _trained(optimizer: type[torch.optim.Optimizer], **options: Any) -> Any:
    torch.manual_seed(0)
    model = Tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:2], "lr": 0.5}, {"params": trained[2:], "lr": 0.25}]
    made = optimizer(groups, **options)
    for _ in range(3):
        made.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        made.step()
    return model, made


def _saved(state: dict[str, Any], directory: Path) -> Checkpoint:
    dcp_peer.save(state, checkpoint_id=directory, no_dist=True)
    return dcp.read(LocalStore(), str(directory))


def _check_all(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compare every tensor of model and optimizer with what the checkpoint says, bit for bit."""
    for fqn, tensor in model.state_dict().items():
        assert same_bits(loaded(checkpoint, fqn), tensor), fqn
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    slots = 0
    for parameter, fqn in names.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                assert same_bits(loaded(checkpoint, fqn, slot), value), (fqn, slot)
                slots += 1
    entries = checkpoint.state_map.entries
    assert len(entries) == len(model.state_dict()) + slots
    assert checkpoint.manifest.roles == {"fixed": "frozen", "running_mean": "buffer"}


@pytest.mark.parametrize("flatten", [False, True], ids=["grouped", "flattened"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adam, {"amsgrad": True}),
    ],
    ids=["adamw", "sgd", "adagrad", "amsgrad"],
)
def test_any_optimizer_is_read_in_both_forms(
    tmp_path: Path,
    optimizer: type[torch.optim.Optimizer],
    options: dict[str, Any],
    *,
    flatten: bool,
) -> None:
    """The flattened form has no groups, and the names of a sequence look like their indices."""
    model, made = _trained(optimizer, **options)
    weights, states = get_state_dict(
        model, made, options=StateDictOptions(flatten_optimizer_state_dict=flatten)
    )
    checkpoint = _saved({"model": weights, "optim": states, "train": {"step": 3}}, tmp_path / "c")
    _check_all(checkpoint, model, made)
    groups = checkpoint.param_groups
    assert [group["lr"] for group in groups] == [0.5, 0.25]
    trained = [fqn for fqn, p in model.named_parameters() if p.requires_grad]
    assert [group["params"] for group in groups] == [trained[:2], trained[2:]]
    assert checkpoint.step == 3
    assert checkpoint.extra["train"] == {"step": 3}


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("tutorial", lambda m, o: {"app": {"model": m, "optim": o}}),
        (
            "torchtitan",
            lambda m, o: {**m, "optimizer": o, "train_state": {"step": torch.tensor(3)}},
        ),
        ("lightning", lambda m, o: {"state_dict": m, "optimizer_0": o, "global_step": 3}),
        ("any", lambda m, o: {"net": m, "optimizers": o}),
    ],
)
def test_programs_may_name_model_and_optimizer_as_they_like(
    tmp_path: Path, name: str, wrap: Any
) -> None:
    """A reader that knows one prefix would call parameters unknown, and drop them."""
    model, made = _trained(torch.optim.AdamW)
    checkpoint = _saved(wrap(*get_state_dict(model, made)), tmp_path / name)
    _check_all(checkpoint, model, made)
    assert len(checkpoint.param_groups) == 2
    assert checkpoint.step == 3


def test_accelerates_two_folders_are_one_checkpoint(tmp_path: Path) -> None:
    """Model and optimizer lie apart; each alone would be half a state."""
    model, made = _trained(torch.optim.AdamW)
    weights, states = get_state_dict(model, made)
    for folder, state in (
        ("pytorch_model_fsdp_0", {"model": weights}),
        ("optimizer_0", {"optimizer": states}),
    ):
        dcp_peer.save(state, checkpoint_id=tmp_path / folder, no_dist=True)
    checkpoint = open_source(LocalStore(), str(tmp_path))
    _check_all(checkpoint, model, made)
    assert checkpoint.manifest.source["format"] == "dcp"


def test_a_model_alone_is_a_checkpoint(tmp_path: Path) -> None:
    """Nothing tells parameters from buffers then, and no names from an optimizer help."""
    model, _ = _trained(torch.optim.AdamW)
    for number, state in enumerate(({"model": model.state_dict()}, model.state_dict())):
        checkpoint = _saved(state, tmp_path / str(number))
        assert sorted(key.fqn for key in checkpoint.state_map.entries) == sorted(model.state_dict())
        assert checkpoint.manifest.roles == {}


def test_numbers_that_only_a_pickle_holds_are_tensors_too() -> None:
    """Steps were Python numbers once, and still are in some optimizers."""
    store = MemoryStore()
    save = Save(objects={"optim.state.w.step": 7, "optim.state.w.d": 0.1, "optim.state.w.n": None})
    save.whole("model.w", torch.ones(2))
    save.whole("optim.state.w.exp_avg", torch.zeros(2))
    write(store, "c", save)
    checkpoint = dcp.read(store, "c")
    assert same_bits(loaded(checkpoint, "w", "step"), torch.tensor(7.0))
    assert same_bits(loaded(checkpoint, "w", "d"), torch.tensor(0.1, dtype=torch.float64))
    assert checkpoint.extra["optimizer_state"] == {"w": {"n": None}}
    assert checkpoint.step == 7


def test_steps_of_the_run_count_before_those_of_the_optimizer() -> None:
    """DeepSpeed's optimizers in half precision make one step more, before the first."""
    store = MemoryStore()
    save = Save(objects={"optim.state.w.step": 5, "global_steps": 4})
    save.whole("model.w", torch.ones(2))
    write(store, "c", save)

    assert dcp.read(store, "c").step == 4


def test_everything_else_is_kept_and_has_a_policy(tmp_path: Path) -> None:
    """A resumed run first misses an unclassified value."""
    model, made = _trained(torch.optim.AdamW)
    weights, states = get_state_dict(model, made)
    checkpoint = _saved(
        {
            "model": weights,
            "optim": states,
            "lr_scheduler": {"last_epoch": 3, "base_lrs": [0.5], "_last_lr": (0.1, 0.2)},
            "rng": torch.get_rng_state(),
            "dataloader": {"dp_rank_0": pickle.dumps({"at": 7}), "world_size": 2},
            "note": "x",
            "average": {"inner.0.weight": torch.ones(4, 3)},
            "lists": [torch.ones(2), {"a": 1}],
            "images": torch.ones(2, 40_000, dtype=torch.uint8),
        },
        tmp_path / "c",
    )
    extra, items = checkpoint.extra, checkpoint.manifest.items
    assert extra["lr_scheduler"]["last_epoch"] == 3
    assert extra["lr_scheduler"]["_last_lr"] == {"tuple": [0.1, 0.2]}
    assert set(extra["dataloader"]["dp_rank_0"]) == {"base64"}
    assert items["rng"].policy == "reseed"
    assert set(extra["rng"]) == {"dtype", "shape", "base64"}
    assert items["note"].policy == "replicate"
    assert same_bits(loaded(checkpoint, "average.inner.0.weight"), torch.ones(4, 3))
    assert same_bits(loaded(checkpoint, "lists.0"), torch.ones(2))
    assert same_bits(loaded(checkpoint, "images"), torch.ones(2, 40_000, dtype=torch.uint8))
    assert checkpoint.manifest.roles["average.inner.0.weight"] == "extra"
    accounted = {*items, "model", "optimizer.state", "optimizer.param_groups"}
    assert {"lr_scheduler.last_epoch", "dataloader.world_size", "lists.1.a"} <= accounted


def test_a_foreign_value_is_dropped_by_name_and_nothing_runs(tmp_path: Path) -> None:
    """One exotic object must not bar the way to the tensors, nor be executed."""
    marker = tmp_path / "executed"
    store = MemoryStore()
    save = Save(objects={"sampler": Payload(os.system, f"touch {marker}")})
    save.whole("w", torch.ones(2))
    write(store, "c", save)
    checkpoint = dcp.read(store, "c")
    item = checkpoint.manifest.items["sampler"]
    assert item.policy == "drop"
    assert "system" in item.note
    assert "sampler" not in checkpoint.extra
    assert not marker.exists()


def test_a_foreign_value_among_the_groups_is_an_error() -> None:
    """Hyper-parameters cannot be left out."""
    store = MemoryStore()
    save = Save(
        objects={"optim.param_groups.0.params": ["w"], "optim.param_groups.0.lr": Payload(abs, 1)}
    )
    save.whole("model.w", torch.ones(2))
    write(store, "c", save)
    with pytest.raises(ForeignClassError, match=r"__0_0\.distcp \(optim\.param_groups\.0\.lr\)"):
        dcp.read(store, "c")


@pytest.mark.parametrize("name", ["dcp_fsdp4"])
def test_what_fsdp2_saved_is_read_bit_for_bit(name: str) -> None:
    """Four ranks, uneven shards: made by torch itself, tensors gathered in its processes."""
    folder = checkpoint_fixture(name)
    checkpoint = dcp.read(LocalStore(), str(folder / "checkpoint"))
    assert unequal(checkpoint, load_file(folder / "expected.safetensors")) == []
    assert checkpoint.step == 4
    assert checkpoint.param_groups[0]["betas"] == [0.9, 0.95]


def test_layers_of_thousands_of_chunks_need_few_reads() -> None:
    """Every item is a zip of its own; one by one they would be two requests each."""
    store = CountingStore()
    save = Save()
    for layer, tensor in random_tensors({f"l{i}": (8, 600) for i in range(100)}, 1).items():
        save.cut(f"{layer}.weight", tensor, 0, range(4))
    write(store, "c", save)
    checkpoint = dcp.read(store, "c")
    assert len(store.reads) <= 4 * 101
    assert store.read_bytes < sum(store.sizes("c").values())
    assert len(checkpoint.state_map.entries) == 100
    for fqn, tensor in random_tensors({f"l{i}": (8, 600) for i in range(100)}, 1).items():
        assert same_bits(loaded(checkpoint, f"{fqn}.weight"), tensor)


def test_tensors_that_dcp_wrote_as_safetensors_are_found(tmp_path: Path) -> None:
    """The metadata say where the header begins and not where the tensors are."""
    model, made = _trained(torch.optim.AdamW)
    weights, states = get_state_dict(model, made)
    state = {"model": weights, "optim": states, "train": {"step": 3}}
    writer = FileSystemWriter(
        tmp_path, serialization_format=SerializationFormat.SAFETENSORS, thread_count=2
    )
    dcp_peer.save(state, storage_writer=writer, no_dist=True)
    _check_all(dcp.read(LocalStore(), str(tmp_path)), model, made)
    victim = tmp_path / "__0_1.distcp"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(CheckpointCorruptError, match=r"__0_1\.distcp"):
        dcp.read(LocalStore(), str(tmp_path))


def test_a_state_that_was_not_flattened_is_refused(tmp_path: Path) -> None:
    """Its weights are in one pickle; a conversion would tell of success and hold none of them."""
    planner = dcp_peer.DefaultSavePlanner(flatten_state_dict=False)
    state = {"model": Tiny().state_dict()}
    dcp_peer.save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)

    with pytest.raises(UnsupportedVersionError, match="flatten_state_dict"):
        dcp.read(LocalStore(), str(tmp_path))


def _two_ranks() -> tuple[MemoryStore, Any]:
    store = MemoryStore()
    save = Save(objects={"train.step": 3})
    save.cut("model.w", torch.arange(12.0).reshape(6, 2), 0, (0, 1))
    save.whole("model.b", torch.ones(3))
    return store, write(store, "c", save)


def test_new_data_under_old_metadata_is_noticed() -> None:
    """torch overwrites in place and writes metadata last: torch loads what a crash leaves."""
    store, _ = _two_ranks()
    old = store.read("c/.metadata")
    for shape, dtype in (((8, 2), torch.float32), ((6, 2), torch.float64)):
        save = Save(objects={"train.step": 4})
        save.cut("model.w", torch.ones(shape, dtype=dtype), 0, (0, 1))
        save.whole("model.b", torch.ones(3))
        write(store, "c", save)
        store.write_atomic("c/.metadata", old, fsync=False)
        with pytest.raises(CheckpointCorruptError, match=r"distcp.*another save overwrote"):
            dcp.read(store, "c")


def test_a_file_may_end_with_an_item_of_a_rank_without_rows() -> None:
    """FSDP2 writes one for every tensor with fewer rows than ranks; it is no other save's."""
    whole = torch.arange(6.0).reshape(2, 3)
    rows = [Chunk(offsets=(row, 0), data=whole[row : row + 1], rank=row) for row in range(2)]
    empty = Chunk(offsets=(2, 0), data=whole[2:], rank=1)
    store = MemoryStore()
    write(store, "c", Save(tensors={"model.a": ((2, 3), [*rows, empty])}))

    assert torch.equal(loaded(dcp.read(store, "c"), "model.a"), whole)


def test_missing_truncated_and_leftover_files_are_named() -> None:
    """Each is a different thing to do for whoever reads the message."""
    store, _ = _two_ranks()
    whole = store.read("c/__1_0.distcp")
    store.delete("c/__1_0.distcp")
    with pytest.raises(CheckpointCorruptError, match=r"lacks __1_0\.distcp with model\.w"):
        dcp.read(store, "c")
    store.write_atomic("c/__1_0.distcp", whole[:-9], fsync=False)
    with pytest.raises(CheckpointCorruptError, match=r"__1_0\.distcp: it has .* truncated"):
        dcp.read(store, "c")
    store.write_atomic("c/__1_0.distcp", whole, fsync=False)
    store.write_atomic("c/__7_0.distcp", whole, fsync=False)
    items = dcp.read(store, "c").manifest.items
    assert items["__7_0.distcp"].policy == "drop"
    store.delete("c/.metadata")
    assert not recognise(store, "c")
    with pytest.raises(CheckpointNotFoundError, match="not finished"):
        dcp.read(store, "c")


def test_holes_and_overlaps_are_errors_that_name_the_tensor() -> None:
    """Garbage in a hole looks like weights."""
    store, metadata = _two_ranks()
    entry = metadata.state_dict_metadata["model.w"]
    for chunks in (entry.chunks[:1], [*entry.chunks, entry.chunks[0]]):
        metadata.state_dict_metadata["model.w"] = replace(entry, chunks=chunks)
        rewrite(store, "c", metadata)
        if len(chunks) == 1:
            with pytest.raises(UncoveredRegionError, match=r"model\.w|\bw\b"):
                dcp.read(store, "c")
        else:
            assert same_bits(
                loaded(dcp.read(store, "c"), "model.w"), torch.arange(12.0).reshape(6, 2)
            )


@pytest.mark.parametrize(
    "path", ["../other/__0_0.distcp", "/etc/passwd", "a/../../b", "", "@inline", "a\0b", "\udcff"]
)
def test_no_path_leads_out_of_the_checkpoint(path: str) -> None:
    """Metadata are a stranger's; a file of the reader's own must never be what they name."""
    store, metadata = _two_ranks()
    index = MetadataIndex("model.b", torch.Size([0]))
    metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path=path)
    rewrite(store, "c", metadata)
    with pytest.raises(CheckpointCorruptError, match=r"c/\.metadata"):
        dcp.read(store, "c")


def test_extensions_and_foreign_metadata_are_refused(tmp_path: Path) -> None:
    """Compressed items are not tensors; ``.metadata`` is a pickle that torch trusts."""
    store, metadata = _two_ranks()
    index = MetadataIndex("model.b", torch.Size([0]))
    info = metadata.storage_data[index]
    metadata.storage_data[index] = replace(info, transform_descriptors=["zstd"])
    rewrite(store, "c", metadata)
    with pytest.raises(CheckpointCorruptError, match="extension"):
        dcp.read(store, "c")
    metadata.storage_data[index] = info
    metadata.planner_data = Payload(os.system, f"touch {tmp_path / 'executed'}")
    rewrite(store, "c", metadata)
    with pytest.raises(ForeignClassError, match="system"):
        dcp.read(store, "c")
    assert not (tmp_path / "executed").exists()


def test_shards_without_metadata_say_where_they_belong(tmp_path: Path) -> None:
    """``HuggingFaceStorageWriter`` leaves only safetensors, whose shapes are those of shards."""
    tensor = torch.arange(21.0).reshape(7, 3)
    for index, low in enumerate((0, 3, 6), start=1):
        part = tensor[low : low + 3].clone()
        writer = HuggingFaceStorageWriter(str(tmp_path / str(index)), save_distributed=True)
        dcp_peer.save({"w": part, "b": torch.ones(2)}, storage_writer=writer, no_dist=True)
        (made,) = (tmp_path / str(index)).glob("*.safetensors")
        # One process cannot write the second shard, so its place is put right.
        data = made.read_bytes().replace(
            b'"saved_offsets\\": [0, 0]', b'"saved_offsets\\": [%d, 0]' % low
        )
        name = made.name.replace("shard-00001", f"shard-0000{index}")
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / name).write_bytes(data)
    checkpoint = open_source(LocalStore(), str(tmp_path / "c"))
    assert same_bits(loaded(checkpoint, "w"), tensor)
    assert same_bits(loaded(checkpoint, "b"), torch.ones(2))
    (tmp_path / "c" / name.replace("shard-00003", "shard-00002")).unlink()
    with pytest.raises(CheckpointCorruptError, match="shard 2"):
        open_source(LocalStore(), str(tmp_path / "c"))
