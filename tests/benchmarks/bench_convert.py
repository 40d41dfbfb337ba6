"""A DeepSpeed ZeRO checkpoint made universal: DeepSpeed's own tool, ``ucp convert``, ``cp -r``;
and loaded by four ranks under another layout.

    python -m tests.benchmarks convert --gibibytes 1.25 2.8 --stages 1 3 --dp 2 --rounds 3

Each conversion is a whole process, start included. ``direct_load`` needs no conversion.
``universal_load`` is DeepSpeed's load of what its tool made, so its way takes both. Either load
ends with the same state in every rank: torch parameters and an optimizer's moments under ZeRO. Only
the load itself counts, not the start of the ranks and their engines.

The page cache is warm and no program calls fsync. Every round writes into a fresh folder once dirty
pages are gone, and the ways take turns, there and back. Memory is the sampled sum of the resident
sizes of all processes of a way; bytes went through read and write calls. Ratios are of the best
rounds, because other work on the machine only adds. The checkpoints hold random fp32 parameters and
Adam's two slots in DeepSpeed's own format.
"""

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ucp_core.formats.deepspeed.writer import write
from ucp_core.geometry import Box
from ucp_core.native import LocalTensor, open_checkpoint, save_rank
from ucp_core.storage import LocalStore

GIB = 1 << 30
#: Loading a checkpoint of two ranks, under another layout.
NUM_LOADING = 4
WIDTH = 1024
SLOTS = ("weight", "exp_avg", "exp_avg_sq")
SAMPLE_S = 0.01
MEMORY = "512MiB"


def shapes(num_bytes: int) -> dict[str, tuple[int, ...]]:
    """Return the parameters of a decoder whose state has about so many bytes."""
    layer = {
        "attention.qkv.weight": (3 * WIDTH, WIDTH),
        "attention.out.weight": (WIDTH, WIDTH),
        "mlp.up.weight": (4 * WIDTH, WIDTH),
        "mlp.down.weight": (WIDTH, 4 * WIDTH),
        "attention.norm.weight": (WIDTH,),
        "mlp.norm.weight": (WIDTH,),
        "mlp.up.bias": (4 * WIDTH,),
    }
    size = 4 * len(SLOTS) * sum(map(prod, layer.values()))
    return {
        f"layers.{number}.{name}": shape
        for number in range(max(1, round(num_bytes / size)))
        for name, shape in layer.items()
    }


def make(directory: Path, num_bytes: int, *, stage: int, dp: int) -> int:
    """Write a checkpoint of ZeRO ``stage`` over ``dp`` ranks and return the bytes of its state."""
    generator = np.random.default_rng(0)
    parameters = shapes(num_bytes)
    native = str(directory) + ".native"
    save_rank(
        LocalStore(),
        native,
        step=1,
        attempt=1,
        rank=0,
        world_size=1,
        tensors=[
            LocalTensor(
                fqn=fqn,
                slot=slot,
                dtype="F32",
                shape=values.shape,
                box=Box.full(values.shape),
                data=memoryview(values.tobytes()),
            )
            for fqn, shape in parameters.items()
            for slot, values in (
                *((slot, generator.random(shape, np.float32)) for slot in SLOTS),
                ("step", np.ones((), np.float32)),
            )
        ],
        extra={},
        param_groups=[{"params": list(parameters), "lr": 1e-3, "betas": [0.9, 0.95]}],
        source={},
        fsync=False,
    )
    opened = open_checkpoint(LocalStore(), native)
    target = str(directory)
    write(opened, LocalStore(), target, memory_bytes=GIB, stage=stage, dp=dp, fsync=False)
    shutil.rmtree(native)
    return opened.state_map.num_bytes


def measure(command: list[str]) -> dict[str, float]:
    """Run a command and return what it took."""
    before, io = resource.getrusage(resource.RUSAGE_CHILDREN), _io()
    begun = time.perf_counter()
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    # Installed packages keep their byte code; the working copy is compiled by the first way.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        peak = [0]
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, done))
        watcher.start()
        assert process.stdout is not None
        output = process.stdout.read()
        process.wait()
        wall_s = time.perf_counter() - begun
        done.set()
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{output.decode()[-2000:]}")
    after, now = resource.getrusage(resource.RUSAGE_CHILDREN), _io()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "peak_tree_bytes": peak[0],
        "read_bytes": now["rchar"] - io["rchar"],
        "written_bytes": now["wchar"] - io["wchar"],
    }


def _io() -> dict[str, int]:
    """Return this process's counters, to which the kernel adds those of reaped children."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _watch(pid: int, peak: list[int], done: threading.Event) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    while not done.wait(SAMPLE_S):
        total, left = 0, [pid]
        while left:
            one = left.pop()
            try:
                total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * page
                left += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
            except (OSError, IndexError):
                continue
        peak[0] = max(peak[0], total)


def ways(source: Path, stage: int, *, peer: bool, processes: int | None) -> dict[str, list[str]]:
    """Return the commands that convert or copy; the destination is added to each."""
    ours = [sys.executable, "-m", "ucp_core.cli", "convert", "--memory", MEMORY]
    ours += ["--processes", str(processes)] if processes else []
    found = {
        "ucp convert": [*ours, str(source)],
        "cp -r": ["cp", "-r", str(source)],
    }
    if peer:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--inject_missing_state"] if stage < 3 else []
        command += ["--input_folder", str(source / "global_step1"), "--output_folder"]
        found = {"ds_to_universal": command} | found
    return found


def load_s(module: str, *arguments: str) -> float:
    """Return the seconds in which the slowest rank of ``module`` loads."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_LOADING)]
    command += ["-m", f"tests.benchmarks.{module}", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["load_s"])


def one(root: Path, options: argparse.Namespace, gibibytes: float, stage: int, dp: int) -> Any:
    """Measure every way on one checkpoint."""
    source = root / "source"
    size_bytes = make(source, int(gibibytes * GIB), stage=stage, dp=dp)
    commands = ways(source, stage, peer=options.peer, processes=options.processes)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    num_files: dict[str, int] = {}
    loads_s: dict[str, list[float]] = {"direct_load": [], "universal_load": []}
    for number in range(options.rounds):
        # Each finds the page cache as the one before left it, so the order alternates.
        for name, command in list(commands.items())[:: 1 if number % 2 == 0 else -1]:
            target = root / "target"
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            rounds[name].append(measure([*command, str(target)]))
            num_files[name] = sum(path.is_file() for path in target.rglob("*"))
            if name == "ds_to_universal":
                parameters = json.dumps(shapes(int(gibibytes * GIB)))
                loads_s["universal_load"].append(
                    load_s("peer_universal_load", str(target), str(stage), parameters)
                )
        loads_s["direct_load"].append(load_s("direct_load", str(source), str(stage)))
    shutil.rmtree(root / "target", ignore_errors=True)
    found: dict[str, Any] = {"gibibytes": gibibytes, "stage": stage, "dp": dp}
    found |= {"state_bytes": size_bytes, "source_bytes": _size(source), "ways": {}}
    for name, measured in rounds.items():
        walls = [item["wall_s"] for item in measured]
        found["ways"][name] = {
            "best_s": round(min(walls), 3),
            "median_s": round(statistics.median(walls), 3),
            "cpu_s": round(min(item["cpu_s"] for item in measured), 3),
            "peak_tree_mib": round(max(item["peak_tree_bytes"] for item in measured) / 2**20),
            "read_over_state": round(measured[-1]["read_bytes"] / size_bytes, 3),
            "written_over_state": round(measured[-1]["written_bytes"] / size_bytes, 3),
            "files": num_files[name],
        }
    best = {name: value["best_s"] for name, value in found["ways"].items()}
    found["speed_over_cp"] = round(best["cp -r"] / best["ucp convert"], 3)
    loads = {name: seconds for name, seconds in loads_s.items() if seconds}
    for name, seconds in loads.items():
        found[f"{name}_s"] = {
            "best": round(min(seconds), 3),
            "median": round(statistics.median(seconds), 3),
        }
    if "universal_load" in loads:
        converted_s, direct_s = best["ds_to_universal"], min(loads["direct_load"])
        peer_s = converted_s + min(loads["universal_load"])
        found["times_faster_than_peer"] = round(converted_s / best["ucp convert"], 1)
        found["direct_load_times_faster"] = round(peer_s / direct_s, 1)
    shutil.rmtree(source)
    return found


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gibibytes", nargs="+", type=float, default=[1.25, 2.8])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--dp", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave out DeepSpeed")
    parser.add_argument("--directory", help="Where to work; default: the temporary one.")
    parser.add_argument("--json", action="store_true", help="Print one JSON document.")
    options = parser.parse_args()
    if options.peer and importlib.util.find_spec("deepspeed") is None:
        parser.error(
            "DeepSpeed is not installed: pip install 'everstep[interop]', or give --no-peer"
        )
    results: list[Any] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        for gibibytes in options.gibibytes:
            for stage in options.stages:
                for dp in options.dp:
                    results.append(one(Path(root), options, gibibytes, stage, dp))
                    if not options.json:
                        _print(results[-1])
    if options.json:
        print(json.dumps({"processors": os.cpu_count(), "results": results}, indent=1))


def _print(result: dict[str, Any]) -> None:
    print(f"{result['gibibytes']} GiB, ZeRO-{result['stage']}, dp {result['dp']}")
    for name, value in result["ways"].items():
        facts = "  ".join(f"{key} {number}" for key, number in value.items())
        print(f"  {name:<16} {facts}")
    print(f"  {result['speed_over_cp']} of the speed of cp", flush=True)
    print(f"  direct load {result['direct_load_s']}", flush=True)
    if "universal_load_s" in result:
        print(
            f"  DeepSpeed's load of what its tool made {result['universal_load_s']}\n"
            f"  conversion {result['times_faster_than_peer']} times faster than ds_to_universal\n"
            f"  loading under another layout {result['direct_load_times_faster']} times faster "
            "than ds_to_universal and DeepSpeed's load",
            flush=True,
        )


if __name__ == "__main__":
    main()
