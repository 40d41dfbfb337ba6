"""The newest step of a run in another format, while the run deletes older ones."""

import importlib
import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from orchestrator.config import load
from orchestrator.driver import export_run
from orchestrator.errors import RunNotFoundError
from tests.support.made import save_part, tensor_of
from ucp_core.native import Collector, Found, checkpoint_name
from ucp_core.storage import open_store

MEMORY = 64 << 20


def save(run: Path, step: int) -> None:
    """Commit a step whose weight says which one it is."""
    store, path = open_store(str(run / "checkpoints" / checkpoint_name(step)))
    weight = np.full((64, 64), step, np.float32)
    tensor = tensor_of("linear.weight", weight.shape, memoryview(weight.tobytes()))
    save_part(store, path, [tensor], step=step)


def exported_step(directory: Path) -> int:
    weights = load_file(directory / "model.safetensors")
    [step] = np.unique(weights["linear.weight"])
    return int(step)


def test_the_newest_step_or_the_one_that_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "run", step)

    newest = export_run(
        str(tmp_path / "run"), str(tmp_path / "a"), format="huggingface", memory_bytes=MEMORY
    )
    export_run(
        str(tmp_path / "run"),
        str(tmp_path / "b"),
        format="huggingface",
        memory_bytes=MEMORY,
        step=1,
    )

    assert newest["step"] == exported_step(tmp_path / "a") == 2
    assert exported_step(tmp_path / "b") == 1


@pytest.mark.parametrize("how", ["init_from", "preset"])
@pytest.mark.parametrize(("dtype", "said"), [(None, "float32"), ("bf16", "bfloat16")])
def test_the_configuration_of_the_model_says_the_dtype_of_the_weights(
    tmp_path: Path, how: str, dtype: str | None, said: str
) -> None:
    """transformers casts to it: float32 weights were loaded as bfloat16, without a word."""
    base, run = tmp_path / "base", tmp_path / "run"
    base.mkdir()
    (base / "config.json").write_text('{"dtype": "bfloat16", "vocab_size": 300}')
    (base / "tokenizer.model").write_bytes(b"words")
    save(run, 1)
    text = f"run: {{directory: {run}}}\nworkers: {{max: 1}}\n"
    chosen = {"init_from": f"run.init_from={base}", "preset": f"model.preset=hf:{base}"}[how]
    (run / "config.yaml").write_text(load(text, [chosen]).to_yaml())

    to = tmp_path / "to"
    document = export_run(str(run), str(to), format="huggingface", memory_bytes=MEMORY, dtype=dtype)

    config = json.loads((to / "config.json").read_text())
    assert config == {"dtype": said, "vocab_size": 300}
    assert (to / "tokenizer.model").read_bytes() == b"words"
    assert document["copied"] == ["config.json", "tokenizer.model"]


def test_a_run_without_that_step_says_what_it_has(tmp_path: Path) -> None:
    def export(**more: Any) -> None:
        export_run(
            str(tmp_path / "run"),
            str(tmp_path / "to"),
            format="huggingface",
            memory_bytes=MEMORY,
            **more,
        )

    with pytest.raises(RunNotFoundError, match="holds no run"):
        export()
    (tmp_path / "run/metrics").mkdir(parents=True)
    with pytest.raises(RunNotFoundError, match="no step in storage yet: wait for the first"):
        export()
    save(tmp_path / "run", 3)
    with pytest.raises(RunNotFoundError, match="no step 4 in storage; it has 00000003"):
        export(step=4)


def test_a_step_that_is_deleted_once_it_was_found_is_replaced_by_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one moment in which nothing holds it."""
    module: Any = importlib.import_module("orchestrator.driver.export")
    run = tmp_path / "run"
    save(run, 1)
    find = module.find_committed
    news: Iterator[int] = iter([2])

    def found_then_deleted(*args: Any, **more: Any) -> Found | None:
        found: Found | None = find(*args, **more)
        for step in news:
            save(run, step)
            shutil.rmtree(run / "checkpoints" / checkpoint_name(step - 1))
        return found

    monkeypatch.setattr(module, "find_committed", found_then_deleted)
    document = export_run(str(run), str(tmp_path / "to"), format="huggingface", memory_bytes=MEMORY)

    assert document["step"] == exported_step(tmp_path / "to") == 2


def test_every_export_is_whole_while_the_run_keeps_one_step(tmp_path: Path) -> None:
    """It commits and deletes as fast as it can."""
    run, ends = tmp_path / "run", threading.Event()
    save(run, 1)

    def train() -> None:
        store, path = open_store(str(run / "checkpoints"))
        collector = Collector(store, path, keep=1)
        for step in itertools.count(2):
            save(run, step)
            collector.collect(())
            if ends.is_set():
                return

    thread = threading.Thread(target=train)
    thread.start()
    try:
        steps = []
        for number in range(10):
            to = tmp_path / f"to-{number}"
            document = export_run(str(run), str(to), format="huggingface", memory_bytes=MEMORY)
            assert exported_step(to) == document["step"]
            steps.append(document["step"])
    finally:
        ends.set()
        thread.join()
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]
