"""``ucp diff``, ``export`` and ``extract`` as a person and as a program use them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.support.checkpoints import Whole, save, small_state
from tests.support.commands import ucp
from ucp_core.geometry import TensorKey
from ucp_core.storage import LocalStore

STEP = "step-00000007"


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    save(LocalStore(), small_state(), step=7, root=str(tmp_path / "a"))
    return str(tmp_path / "a" / STEP)


@pytest.fixture
def changed(tmp_path: Path) -> str:
    """The same state but for one element of one tensor."""
    state = small_state()
    key = TensorKey("wte", "exp_avg")
    values = np.frombuffer(state[key].data, np.uint32).copy()
    values[13] ^= 1
    state[key] = replace(state[key], data=values.tobytes())
    save(LocalStore(), state, step=7, root=str(tmp_path / "b"))
    return str(tmp_path / "b" / STEP)


def test_diff_of_equals_is_success(checkpoint: str, tmp_path: Path) -> None:
    """Also of a copy in another format, for the weights that it has."""
    assert (
        ucp("export", checkpoint, str(tmp_path / "hf"), "--format", "huggingface").returncode == 0
    )

    assert ucp("diff", checkpoint, checkpoint).returncode == 0
    done = ucp("diff", checkpoint, str(tmp_path / "hf"), "--slots", "weight", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["num_equal"] == 4


def test_diff_names_what_differs_and_fails(checkpoint: str, changed: str) -> None:
    """A script looks at the exit code, a person at the line, a program at the JSON."""
    done = ucp("diff", checkpoint, changed)

    assert done.returncode == 1
    assert "wte" in done.stdout
    assert "1 of 32" in done.stdout
    assert "[3, 1]" in done.stdout
    assert "7 tensors equal" in done.stdout
    document = json.loads(ucp("diff", checkpoint, changed, "--json").stdout)
    assert [(t["fqn"], t["slot"]) for t in document["tensors"]] == [("wte", "exp_avg")]
    assert document["tensors"][0]["first_index"] == [3, 1]
    assert ucp("diff", checkpoint, changed, "--only", "norm").returncode == 0
    assert ucp("diff", checkpoint, changed, "--slots", "weight").returncode == 0
    assert ucp("diff", checkpoint, changed, "--absolute", "1e38").returncode == 0


def test_diff_tells_of_small_values(checkpoint: str, tmp_path: Path) -> None:
    """They are part of the state."""
    save(LocalStore(), small_state(), step=8, root=str(tmp_path / "c"))

    done = ucp("diff", checkpoint, str(tmp_path / "c" / "step-00000008"))

    assert done.returncode == 1
    assert "extra.cursor.step: 7 and 8" in done.stdout
    assert "step: 7 and 8" in done.stdout


@pytest.mark.parametrize(
    ("target", "options", "file"),
    [
        ("huggingface", ["--dtype", "bf16", "--shard-size", "60B"], "model.safetensors.index.json"),
        ("dcp", ["--flatten-optimizer", "--model-key", ""], ".metadata"),
        ("universal", [], "manifest.json"),
    ],
)
def test_export_writes_the_format_that_was_asked_for(
    checkpoint: str, tmp_path: Path, target: str, options: list[str], file: str
) -> None:
    """The last file of each is the one that commits it."""
    done = ucp("export", checkpoint, str(tmp_path / "out"), "--format", target, *options, "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["format"] == target
    assert (tmp_path / "out" / file).exists()
    again = ucp("export", checkpoint, str(tmp_path / "out"), "--format", target)
    assert again.returncode == 1
    assert again.stderr.count("\n") == 1


def test_export_says_what_a_format_has_no_place_for(checkpoint: str, tmp_path: Path) -> None:
    """Somebody would train on from it and wonder about his learning rate."""
    shown = ucp("export", checkpoint, str(tmp_path / "hf"), "--format", "huggingface")
    whole = ucp("export", checkpoint, str(tmp_path / "dcp"), "--format", "dcp", "--json")

    assert (
        "not in this format: state of the optimizer (exp_avg), settings of the optimizer's groups, "
        "values of the run (cursor)\n"
    ) in shown.stdout
    assert json.loads(whole.stdout)["left_behind"] == []


def test_inspect_says_what_becomes_of_everything(checkpoint: str, tmp_path: Path) -> None:
    """Nothing that another framework saved is passed over in silence."""
    ucp("export", checkpoint, str(tmp_path / "hf"), "--format", "huggingface")
    (tmp_path / "hf" / "optimizer.pt").write_bytes(b"x")

    shown = ucp("inspect", str(tmp_path / "hf"), "--items")
    found = json.loads(ucp("inspect", str(tmp_path / "hf"), "--json").stdout)

    assert "optimizer.pt: drop, a pickle beside the weights" in shown.stdout
    assert found["items"]["optimizer.pt"]["policy"] == "drop"
    assert (found["ties"], found["frozen"], found["buffers"]) == ({}, [], [])


def test_a_renamed_export_has_the_new_names(checkpoint: str, tmp_path: Path) -> None:
    """Names are the source framework's; other frameworks have others."""
    renames = tmp_path / "renames.yaml"
    renames.write_text("- match: wte\n  to: model.embed_tokens.weight\n")

    done = ucp(
        "export",
        checkpoint,
        str(tmp_path / "hf"),
        "--format",
        "huggingface",
        "--rename",
        str(renames),
    )

    assert done.returncode == 0, done.stderr
    names = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names
    assert "wte" not in names


def test_a_renaming_has_to_match_and_for_two_checkpoints_one_of_them(
    checkpoint: str, tmp_path: Path
) -> None:
    """Names are mended to compare with another framework's, which has them already."""
    renames = tmp_path / "renames.yaml"
    renames.write_text("- match: wte\n  to: model.embed_tokens.weight\n")
    hf = str(tmp_path / "hf")
    made = ucp("export", checkpoint, hf, "--format", "huggingface", "--rename", str(renames))
    assert made.returncode == 0, made.stderr

    same = ucp("diff", checkpoint, hf, "--slots", "weight", "--rename", str(renames))
    idle = ucp("inspect", hf, "--rename", str(renames))

    assert same.returncode == 0, same.stdout + same.stderr
    assert idle.returncode == 1
    assert "renames.yaml:1: 'wte' matches none of the" in idle.stderr


def test_a_rule_has_to_match_unless_it_may_not(checkpoint: str, tmp_path: Path) -> None:
    """With a typing error in it, a rule would silently have no effect."""
    rules = tmp_path / "rules.yaml"
    text = (
        "extends: [llama]\nrules:\n- {match: wte, pattern: unique}\n- {match: wtf, pattern: unique"
    )
    rules.write_text(text + "}\n")
    idle = ucp("inspect", checkpoint, "--rules", str(rules))
    made = str(tmp_path / "made")
    target = ["--format", "deepspeed", "--target-rules", str(rules)]
    idle_target = ucp("export", checkpoint, made, *target)
    rules.write_text(text + ", optional: true}\n")
    allowed = ucp("inspect", checkpoint, "--rules", str(rules))
    family = ucp("inspect", checkpoint, "--rules", "gpt-neox")

    assert idle.returncode == 1
    assert "rules.yaml:4: 'wtf' matches none of the" in idle.stderr
    assert "'wte'" not in idle.stderr
    assert (idle_target.returncode, idle_target.stderr) == (1, idle.stderr)
    assert not Path(made).exists()
    assert allowed.returncode == 0, allowed.stderr
    assert family.returncode == 0, family.stderr


def test_extract_shows_numbers_and_writes_files(checkpoint: str, tmp_path: Path) -> None:
    """The box is cut before it is written, and its bytes are the tensor's."""
    whole = np.frombuffer(small_state()[TensorKey("wte", "exp_avg")].data, np.float32)
    part = whole.reshape(8, 4)[2:5, 1]
    for file in ("part.npy", "part.safetensors"):
        done = ucp(
            "extract",
            checkpoint,
            "wte",
            "--slot",
            "exp_avg",
            "--box",
            "2:5,1",
            "--out",
            str(tmp_path / file),
            "--json",
        )
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        assert facts["box"] == [[2, 5], [1, 2]]
        assert facts["first"] == part.astype(np.float64).tolist()
        assert facts["num_elements"] == 3

    np.testing.assert_array_equal(np.load(tmp_path / "part.npy"), part.reshape(3, 1))
    loaded = safetensors.numpy.load_file(tmp_path / "part.safetensors")
    np.testing.assert_array_equal(loaded["wte"], part.reshape(3, 1))
    text = ucp("extract", checkpoint, "norm").stdout
    assert "[0:4]" in text
    assert "crc32" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("diff", "{old}", "{tmp}/none"), 1, "does not exist"),
        (("diff", "{old}", "{old}", "--only", "("), 1, "not a regular expression"),
        (("diff", "{old}", "{old}", "--memory", "1B"), 2, "too small"),
        (("diff", "{old}", "{old}", "--rules", "{tmp}/none"), 3, "none"),
        (("export", "{old}", "{tmp}/x", "--format", "zip"), 2, "universal, huggingface, dcp"),
        (("export", "{old}", "{tmp}/x", "--format", "dcp", "--stage", "1"), 2, "--stage: not for"),
        (("export", "{old}", "{tmp}/x", "--format", "huggingface", "--dtype", "x"), 1, "dtype"),
        (("extract", "{old}", "wt"), 1, "did you mean wte"),
        (("extract", "{old}", "wte", "--slot", "momentum"), 1, "it has exp_avg, weight"),
        (("extract", "{old}", "wte", "--box", "0:9"), 1, "outside the tensor"),
        (("extract", "{old}", "wte", "--box", "0,0,0"), 1, "has 3 dims"),
        (("extract", "{old}", "wte", "--box", "a"), 1, "not like 0:4"),
        (("extract", "{old}", "wte", "--out", "{tmp}/x.pt"), 1, "neither"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(
    checkpoint: str, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    """A traceback says nothing to a person, and nothing may be written."""
    done = ucp(*(a.format(old=checkpoint, tmp=tmp_path) for a in arguments))

    assert done.returncode == code
    assert message in " ".join(done.stderr.split())
    if code != 2:
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_tensor_that_numpy_does_not_know_is_refused(tmp_path: Path) -> None:
    """Written as integers it would be read as integers."""
    state = {TensorKey("w", "weight"): Whole(dtype="BF16", shape=(2,), data=b"\x80?\x00@")}
    save(LocalStore(), state, step=7, root=str(tmp_path))

    shown = json.loads(ucp("extract", str(tmp_path / STEP), "w", "--json").stdout)
    done = ucp("extract", str(tmp_path / STEP), "w", "--out", str(tmp_path / "w.npy"))

    assert shown["first"] == [1.0, 2.0]
    assert done.returncode == 1
    assert ".safetensors" in done.stderr
    assert not (tmp_path / "w.npy").exists()
