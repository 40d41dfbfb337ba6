"""Faults of the device itself, each made by a script of its own rank: see ``SCRIPT``."""

import json
from pathlib import Path
from typing import Any, Final

from orchestrator.config import RunConfig, load
from orchestrator.driver.faults import wait_for
from orchestrator.driver.launch import Launched
from orchestrator.report import read_run
from tests.gpu.parts import Lab
from tests.gpu.rows import tell
from tests.gpu.runs import NUM_WORKERS, cluster_for
from workers.process import gpus_here, share_of_gpu

RUN_S_MAX: Final = 150.0
#: A rank whose kernel hangs seems to compute: nothing else bounds that.
TIMEOUT_S: Final = 15
SCRIPT: Final = Path(__file__).with_name("train_faulty.py")
#: Rank and action by the step at which it happens. The last one ends the run.
ONCE: Final = {6: (1, "illegal"), 14: (2, "hang"), 22: (3, "out of memory")}
#: Kind of incident of a fault. An illegal access also ends the process, which is another incident.
TOLD_AS: Final = {
    "illegal": ("exception", "crash"),
    "hang": ("hang",),
    "out of memory": ("device_memory",),
}
#: These are met again by every attempt.
ALWAYS: Final = {"assert": (0, "assert"), "out of memory on all": (-1, "out of memory")}


def faults(lab: Lab) -> None:
    """Tell what became of runs whose scripts broke the device."""
    with lab.folder("faults") as root:
        (config, *others) = [
            _config(root, name, ONCE if number == 0 else {}, last, lab)
            for number, (name, last) in enumerate(ALWAYS.items())
        ]
        with cluster_for(config) as cluster:
            _several(config, cluster)
            for each, name in zip(others, list(ALWAYS)[1:], strict=True):
                _ends(Launched(each, cluster), name)


def _config(
    root: Path, name: str, once: dict[int, tuple[int, str]], last: tuple[int, str], lab: Lab
) -> RunConfig:
    folder = root / name.replace(" ", "-")
    folder.mkdir()
    plan = {str(step): fault for step, fault in once.items()} | {"30" if once else "4": last}
    (folder / "plan.json").write_text(json.dumps({"faults": plan, "on_cpu": lab.on_cpu}))
    gpus = gpus_here()
    share = share_of_gpu(NUM_WORKERS, 2, len(gpus)) if gpus else 0
    text = f"""
run: {{directory: {folder / "run"}, script: {SCRIPT}, arguments: [{folder}]}}
cluster: {{local_nodes: 2, gpus_per_worker: {share}}}
workers: {{max: {NUM_WORKERS}, standby_per_node: 1}}
parallel: {{collective_timeout_s: {TIMEOUT_S}}}
train: {{steps: 60, global_batch: 16, micro_batch: 2, lr: 0.01}}
snapshot: {{every_steps: 1}}
"""
    return load(text)


def _several(config: RunConfig, cluster: Any) -> None:
    """Tell what the run made of the faults that happen once, and how the last one ended it."""
    _ends(Launched(config, cluster), "assert")
    incidents = iter(read_run(config.run.directory).incidents)
    for rank, kind in ONCE.values():
        one = next((each for each in incidents if each.kind in TOLD_AS[kind]), None)
        seen = "no incident"
        if one is not None:
            back = f"back in {one.recovery_s:.2f} s" if one.recovery_s is not None else "not back"
            seen = f"{one.kind} ({', '.join(one.guilty) or 'none'}), {back}, {one.lost_steps} lost"
        is_back = one is not None and one.recovery_s is not None
        tell("faults", f"{kind} on rank {rank}", seen, "trains on", ok=is_back)


def _ends(run: Launched, name: str) -> None:
    wait_for(run, lambda _: False, timeout_s=RUN_S_MAX)
    summary = run.summary() or {}
    reason = str(summary.get("reason", summary))
    line = SCRIPT.name in reason
    errors = [each for each in reason.splitlines() if "Error" in each]
    last = (errors or reason.splitlines() or [""])[0][:80]
    seen = f"{summary.get('outcome')}, {'with its line' if line else 'without a line'}: {last}"
    tell("faults", f"{name} ends the run", seen, "failed, its line",
         ok=summary.get("outcome") == "failed" and line)  # fmt: skip
