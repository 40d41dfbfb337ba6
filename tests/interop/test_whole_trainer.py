"""A fine-tuning as people write it, with Trainer and with ours: the same metrics, the same folder.

``tests/chaos/test_whole_trainer.py`` runs it on workers that are killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def check_alike(folder: Path, expected: Path, *, rel: float) -> None:
    """Check that the run behind ``folder`` came to what that behind ``expected`` came to."""
    found, wanted = results(folder), results(expected)
    for name in ("last", "generated"):
        assert found[name] == wanted[name]
    assert found["best"] == pytest.approx(wanted["best"], rel=rel)
    assert found["evaluated"] == pytest.approx(wanted["evaluated"], rel=rel)
    assert len(found["history"]) == len(wanted["history"])
    for line, other in zip(found["history"], wanted["history"], strict=True):
        assert line == pytest.approx(other, rel=rel)
    mine, theirs = (load_file(one / "model.safetensors") for one in (folder, expected))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].numpy() == pytest.approx(value.numpy(), rel=rel, abs=rel)
    for name in ("config.json", "generation_config.json"):
        assert (folder / name).read_text() == (expected / name).read_text()
    assert (folder / "times.txt").read_text() == "once\n"


def test_alone_it_ends_as_with_trainer(tmp_path: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer
    from tests.support.ports import trainer_whole

    for kind in (transformers.Trainer, ElasticTrainer):
        out = tmp_path / f"out-{kind.__name__}"
        out.mkdir()
        trainer_whole.main(kind, str(tmp_path / kind.__name__), str(out))

    expected = results(tmp_path / "out-Trainer")
    # It stops early, and the best step is not the last.
    assert expected["best"][0] < expected["last"] < trainer_whole.STEPS
    check_alike(tmp_path / "out-ElasticTrainer", tmp_path / "out-Trainer", rel=1e-3)
