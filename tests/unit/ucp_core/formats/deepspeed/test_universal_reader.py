"""Folders that ``ds_to_universal`` makes, in their forms and with what can be wrong with them."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.deepspeed_folders import (
    SLOTS,
    UNIVERSAL_MODEL,
    Folder,
    Param,
    assert_equal,
    loaded,
    namespace,
    native,
    read,
    tensor,
    universal,
    with_shapes,
)
from ucp_core.errors import CheckpointCorruptError, UnsupportedVersionError
from ucp_core.formats import recognise
from ucp_core.geometry import TensorKey
from ucp_core.storage import LocalStore


def _write(folder: Folder, path: Path) -> Path:
    for name in folder.trees:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
    return folder.write(path)


@pytest.mark.parametrize("stage", [1, 3])
def test_both_forms_are_whole_with_roles_groups_and_step(tmp_path: Path, stage: int) -> None:
    """Stage 3 makes flat tensors without shape or step, and has frozen ones in pieces."""
    folder = universal(stage=stage)

    checkpoint = read(_write(folder, tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    manifest = checkpoint.manifest
    assert manifest.roles == {"frozen.weight": "frozen", "scale": "buffer"}
    assert [g["params"] for g in manifest.param_groups] == [
        ["embed.weight", "up.weight"],
        ["up.bias"],
    ]
    assert [g["lr"] for g in manifest.param_groups] == [0.1, 0.05]
    assert TensorKey("up.bias", "step") in checkpoint.state_map.entries
    assert manifest.step == 5


def test_the_folder_is_found_by_its_own_latest(tmp_path: Path) -> None:
    """The converter writes ``latest_universal`` beside it."""
    _write(universal(), tmp_path / "global_step5_universal")
    (tmp_path / "latest_universal").write_text("global_step5_universal")

    assert read(tmp_path).manifest.source["format"] == "deepspeed-universal"
    assert recognise(LocalStore(), str(tmp_path)) == "deepspeed"


def test_without_model_files_it_is_still_read(tmp_path: Path) -> None:
    """Stages 1 and 2 say the shapes; what has no state is taken for frozen."""
    folder = universal(beside=False)

    checkpoint = read(_write(folder, tmp_path / "global_step5_universal"))

    assert_equal(loaded(checkpoint), folder.expected)
    assert checkpoint.step == 5
    assert "frozen.weight" in checkpoint.manifest.roles


def test_flat_tensors_without_model_files_say_so_and_take_shapes(tmp_path: Path) -> None:
    """Nothing in such a folder tells the shape."""
    folder = universal(stage=3, beside=False)

    checkpoint = read(_write(folder, tmp_path))

    entry = checkpoint.state_map.entries[TensorKey("up.weight", "weight")]
    assert entry.shape == (12,)
    assert "flat" in checkpoint.manifest.items["zero/up.weight/fp32.pt"].note
    shaped = with_shapes(checkpoint, {p.name: p.shape for p in UNIVERSAL_MODEL})
    trained = {k: v for k, v in folder.expected.items() if k[0] not in {"frozen.weight", "scale"}}
    assert_equal(loaded(shaped), trained)


def test_what_the_converter_leaves_out_of_a_pipeline_is_named(tmp_path: Path) -> None:
    """It copies no files of layers, and these alone have buffers and frozen parameters."""
    folder = universal()
    del folder.trees["mp_rank_00_model_states.pt"]["module"]["scale"]
    del folder.trees["zero/scale/fp32.pt"]

    checkpoint = read(_write(folder, tmp_path))

    item = checkpoint.manifest.items["buffers"]
    assert (item.policy, item.note.split()[0]) == ("drop", "scale")


def test_leftover_fragments_of_an_interrupted_conversion_are_not_taken_in(tmp_path: Path) -> None:
    """The peer globs the old ``tmp`` folder into its next conversion: 63 of 63 tensors wrong."""
    folder = universal()
    folder.trees["tmp/up.weight/0/fp32.02"] = {"param": tensor(np.ones(3, np.float32))}

    checkpoint = read(_write(folder, tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    assert checkpoint.manifest.items["tmp"].policy == "drop"


def test_a_conversion_that_did_not_end_is_refused(tmp_path: Path) -> None:
    """The first files are whole by themselves, so only the last ones show an interruption."""
    folder = universal(beside=False)
    del folder.trees["zero/optimizer_state.pt"]
    folder.trees = {k: v for k, v in folder.trees.items() if "up.weight" not in k}

    with pytest.raises(CheckpointCorruptError, match=r"optimizer_state\.pt.*interrupted"):
        read(_write(folder, tmp_path))


@pytest.mark.parametrize("file", ["fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"])
def test_a_missing_file_of_a_parameter_is_named(tmp_path: Path, file: str) -> None:
    """Without its moments it would restart among parameters that do not."""
    folder = universal()
    del folder.trees[f"zero/up.weight/{file}"]

    with pytest.raises(CheckpointCorruptError, match=r"up\.weight.*missing"):
        read(_write(folder, tmp_path))


def test_groups_may_have_slots_of_their_own(tmp_path: Path) -> None:
    """Muon for matrices, Adam for the rest: no file is missing."""
    folder = universal()
    for name in ("embed.weight", "up.weight"):
        for slot in SLOTS:
            tree = folder.trees.pop(f"zero/{name}/{slot}.pt")
            del folder.expected[name, slot]
        folder.trees[f"zero/{name}/momentum_buffer.pt"] = tree
        shape = next(param.shape for param in UNIVERSAL_MODEL if param.name == name)
        value = Param(name, shape).value(SLOTS[-1])
        folder.expected[name, "momentum_buffer"] = value

    assert_equal(loaded(read(_write(folder, tmp_path))), folder.expected)


def test_a_missing_parameter_is_named(tmp_path: Path) -> None:
    """The model files say which there were."""
    folder = universal()
    folder.trees = {k: v for k, v in folder.trees.items() if not k.startswith("zero/up.weight/")}

    with pytest.raises(CheckpointCorruptError, match=r"lacks the folder of up\.weight"):
        read(_write(folder, tmp_path))


def test_another_shape_than_the_models_is_refused(tmp_path: Path) -> None:
    """The files are of two models then."""
    folder = universal()
    folder.trees["zero/up.weight/fp32.pt"] = {"param": tensor(np.ones((4, 4), np.float32))}

    with pytest.raises(CheckpointCorruptError, match=r"up\.weight"):
        read(_write(folder, tmp_path))


def test_a_slot_of_another_shape_than_the_weight_is_refused(tmp_path: Path) -> None:
    """Without model files nothing else tells the shape."""
    folder = universal(beside=False)
    folder.trees["zero/up.bias/exp_avg.pt"] = folder.trees["zero/up.weight/exp_avg.pt"]

    said = r"up\.bias/exp_avg\.pt: it holds a tensor of \[4, 3\], but the parameter is \[4\]"
    with pytest.raises(CheckpointCorruptError, match=said):
        read(_write(folder, tmp_path))


def test_a_projection_that_the_converter_joined_wrongly_is_refused(tmp_path: Path) -> None:
    """Each rank had its q, then k, then v; end to end that is no tensor of a model."""
    name = "2.self_attention.query_key_value.weight"
    param = Param(name, (24, 3), lambda whole, _: [whole[:12], whole[12:]])
    arguments = namespace(
        num_attention_heads=4, num_key_value_heads=4, kv_channels=2, ds_sequence_parallel_fpdt=True
    )
    info = {"tp_replicated_parameter_patterns": [r"\d+\.norm"]}
    source = native([param], dp=1, tp=2, info=info, more={"args": arguments})
    folder = Folder()
    for slot in ("weight", *SLOTS):
        tree = {"param": tensor(param.value(slot)), "cat_dim": 0}
        folder.trees[f"zero/{name}/{'fp32' if slot == 'weight' else slot}.pt"] = tree
    folder.trees |= {k: v for k, v in source.trees.items() if k.endswith("model_states.pt")}

    with pytest.raises(UnsupportedVersionError, match="read the checkpoint that it was made from"):
        read(_write(folder, tmp_path))


def test_a_step_of_many_numbers_is_refused(tmp_path: Path) -> None:
    """Its first number would be taken for the step."""
    folder = universal(stage=1)
    folder.trees["zero/up.weight/step.pt"] = folder.trees["zero/up.weight/exp_avg.pt"]

    with pytest.raises(CheckpointCorruptError, match="does not hold a step in one tensor"):
        read(_write(folder, tmp_path))
