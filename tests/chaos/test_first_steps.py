"""The first minutes of a newcomer: an empty folder, two commands."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_command import ACT_S_MAX, EVERSTEP, everstep, last_step, wait

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_two_commands_lead_from_an_empty_folder_to_steps(tmp_path: Path) -> None:
    """And the third one says that there is nothing left to do, and where everything is."""
    subprocess.run([*EVERSTEP, "init"], check=True)
    began_s = time.monotonic()
    run = subprocess.Popen(
        [*EVERSTEP, "run", "train.steps=20", "model.preset=tiny"], stdout=subprocess.PIPE, text=True
    )
    while not last_step("runs/first") and run.poll() is None:
        assert time.monotonic() - began_s < ACT_S_MAX
        time.sleep(0.1)
    first_s = time.monotonic() - began_s
    told, _ = run.communicate(timeout=ACT_S_MAX)
    export = told.splitlines()[-1].partition("everstep ")[2].replace("DST", "out")
    exported = subprocess.run([*EVERSTEP, *export.split()], check=False)

    assert run.returncode == 0, f"after {first_s:.1f} s"
    assert "first is complete after step 20 of 20" in told
    assert "Its last checkpoint is runs/first/checkpoints/step-00000020." in told
    assert (tmp_path / "runs/first/report.html").exists()
    assert exported.returncode == 0
    assert (tmp_path / "out/model.safetensors").exists()


def test_a_node_lost_before_the_first_step_is_reported_and_left_at_once(tmp_path: Path) -> None:
    """Eight lines of "waiting" followed, and only the report told that a machine was gone."""
    (tmp_path / "train.py").write_text(
        "import time\nimport torch\nfrom torch.nn.functional import cross_entropy\n"
        "from everstep import run\n"
        "time.sleep(20)\n"
        "inputs, targets = torch.randn(64, 4), torch.zeros(64, dtype=torch.long)\n"
        "def train(session):\n"
        "    model = session.model(lambda: torch.nn.Linear(4, 2))\n"
        "    session.optimizer(lambda named: torch.optim.AdamW(named.values()))\n"
        "    for _ in session.steps(64):\n"
        "        session.train_step(lambda at: cross_entropy(model(inputs[at]), targets[at]))\n"
        "        time.sleep(0.5)\n"  # or all are done between two looks
        "if __name__ == '__main__':\n"
        "    run(train, directory='runs/lost', steps=4, global_batch=8, micro_batch=4)\n"
    )
    subprocess.run([*EVERSTEP, "init", "train.py"], check=True)
    with Path("told").open("w") as told:
        run = subprocess.Popen([*EVERSTEP, "run"], stdout=told, text=True)

    def nodes() -> list[dict[str, Any]]:
        shown = everstep("status", "runs/lost", "--json")
        known = json.loads(shown.stdout)["nodes"] if shown.returncode == 0 else []
        return [node for node in known if node["raylet_pid"]]

    wait(lambda: len(nodes()) == 2, "both nodes have told who they are", run)
    gone = nodes()[0]
    os.kill(gone["raylet_pid"], signal.SIGKILL)
    run.wait(timeout=ACT_S_MAX)
    lines = Path("told").read_text().splitlines()

    (lost,) = (at for at, line in enumerate(lines) if f"node {gone['node'][:8]} is lost" in line)
    (trains,) = (at for at, line in enumerate(lines) if "attempt 1 trains on 1 worker " in line)
    assert lost < trains
    assert "lost is complete after step 4 of 4" in "\n".join(lines)
    first = Path("runs/lost/journal/000001.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in first]
    started_s = next(one["at_s"] for one in entries if one["kind"] == "StartAttempt")
    ready_s = [one["at_s"] for one in entries if one["kind"] == "WorkerReady"]
    # It is not waited for what replaces the node.
    assert started_s - max(at_s for at_s in ready_s if at_s <= started_s) < 5.0


TRAINER = """
import time
import torch
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments
from everstep.integrations.transformers import ElasticTrainer
from tests.support.ports.trainer_elastic import make_model, make_samples

class Paced(TrainerCallback):
    def on_step_begin(self, *_, **__):
        time.sleep(1.0)

if __name__ == "__main__":
    trainer = ElasticTrainer(
        make_model(),
        TrainingArguments(
            output_dir="runs/tuned", num_train_epochs=6, per_device_train_batch_size=4,
            learning_rate=0.01, eval_strategy="epoch", save_strategy="epoch", report_to="none",
            load_best_model_at_end=True, use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=make_samples(16, 1), eval_dataset=make_samples(6, 2), callbacks=[Paced()],
    )
    trainer.train()
    AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    last = trainer.state.log_history[-1]
    print("BEHIND", trainer.state.global_step, last["train_runtime"] > 0, last["total_flos"] > 0)
"""


def test_the_arguments_of_trainer_decide_under_the_command(tmp_path: Path) -> None:
    """The 200 steps of the new configuration won over six epochs. It names what is changed."""
    script, folder = tmp_path / "train.py", "runs/tuned"
    script.write_text(TRAINER)
    subprocess.run([*EVERSTEP, "init", "train.py"], check=True)
    run = subprocess.Popen([*EVERSTEP, "run"], stdout=subprocess.PIPE, text=True)
    wait(lambda: last_step(folder) >= 6, "it trains", run)
    workers = json.loads(everstep("status", folder, "--json").stdout)["workers"]
    os.kill(workers[0]["pid"], signal.SIGKILL)
    told, _ = run.communicate(timeout=ACT_S_MAX)
    summary = json.loads(Path(folder, "summary.json").read_text())
    script.write_text(TRAINER.replace("epochs=6", "epochs=7").replace("0.01", "0.02"))
    again = subprocess.run([*EVERSTEP, "run"], stdout=subprocess.PIPE, text=True, check=False)

    assert "train.steps=24, train.global_batch=4, train.micro_batch=2" in told
    assert "tuned is complete after step 24 of 24" in told
    assert "crash" in {incident["kind"] for incident in summary["incidents"]}
    assert "BEHIND 24 True True" in told
    assert "at step 24 with other arguments than it had before: num_train_epochs=7" in again.stdout
    assert "learning_rate=0.02 (was 0.01)" in again.stdout
    assert "BEHIND 28 True True" in again.stdout
