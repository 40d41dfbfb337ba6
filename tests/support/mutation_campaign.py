"""Converts mutated checkpoints in a child process that a parent watches.

    python -m tests.support.mutation_campaign FORMAT FIRST COUNT

converts COUNT mutations of a checkpoint of FORMAT and prints a table of what became of them. The
child says which mutation it begins, and what came of each; one that does not end is killed and is
a hang. Audit hooks of Python show what is opened, made and removed, and whether anything is run.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.checkpoints import random_state, save
from tests.support.deepspeed_folders import Param, native
from tests.support.made import room_for
from tests.support.megatron_folders import Megatron
from tests.support.mutations import BOMBS, mutate
from ucp_core.conversion import convert
from ucp_core.errors import UcpError
from ucp_core.formats import export, open_source
from ucp_core.geometry import TensorKey
from ucp_core.native import Checkpoint, load
from ucp_core.storage import LocalStore
from ucp_core.torch_files import TensorData, write_torch_file

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
HANG_S = 30
_BEGUN_FIELDS = 4
MEMORY_BYTES = 64 * MIB
MEMORY_MORE_BYTES = 200 * MIB

MODEL = [
    Param("embed.weight", (9, 6)),
    Param("up.weight", (7, 6)),
    Param("up.bias", (7,), group=1),
    Param("base", (4, 5), role="frozen"),
    Param("scale", (3,), role="buffer"),
]


def _copied(name: str, part: str = "checkpoint") -> Callable[[Path], object]:
    return lambda path: shutil.copytree(ROOT / "tests" / "fixtures" / name / part, path)


def _deepspeed(stage: int) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        native(MODEL, stage=stage, dp=3).write(path / "global_step5")
        (path / "latest").write_text("global_step5")

    return make


def _megatron(*, distributed: bool) -> Callable[[Path], object]:
    return lambda path: Megatron(tp=2, pp=2, distributed=distributed).write(path)


def _native(path: Path) -> None:
    root = path.parent / "run"
    save(LocalStore(), random_state(random.Random(3), 12), step=7, world_size=3, root=str(root))
    (root / "step-00000007").rename(path)


def _universal(path: Path) -> None:
    _native(path.parent / "native")
    source = open_source(LocalStore(), str(path.parent / "native"))
    convert(source, LocalStore(), str(path), memory_bytes=MEMORY_BYTES)


def _huggingface(path: Path) -> None:
    native(MODEL, dp=1).write(path.parent / "deepspeed")
    source = open_source(LocalStore(), str(path.parent / "deepspeed"))
    store, where = LocalStore(), str(path)
    memory = MEMORY_BYTES
    export(source, store, where, format="huggingface", memory_bytes=memory, shard_bytes=300)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 9}))


def _torch_weights(path: Path) -> None:
    rng = np.random.default_rng(1)
    parts: dict[str, dict[str, Any]] = {}
    for number in range(6):
        file = f"pytorch_model-{number % 2 + 1:05d}-of-00002.bin"
        array = rng.standard_normal((number + 2, 5)).astype(np.float32)
        ref = TensorData.of_bytes("F32", array.shape, array.tobytes())
        parts.setdefault(file, {})[f"layers.{number}.weight"] = ref
    for file, tree in parts.items():
        write_torch_file(LocalStore(), str(path / file), tree, fsync=False)
    weight_map = {name: file for file, tree in parts.items() for name in tree}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))


FORMATS: dict[str, Callable[[Path], object]] = {
    "deepspeed-zero1": _copied("ds_zero1_dp2"),
    "deepspeed-zero1-small": _deepspeed(1),
    "deepspeed-zero2": _deepspeed(2),
    "deepspeed-zero3": _copied("ds_zero3_dp2"),
    "deepspeed-zero3-small": _deepspeed(3),
    "deepspeed-pipeline": _copied("ds_pp2_dp2_zero1"),
    "deepspeed-universal": _copied("ds_zero1_dp2", "universal_ds"),
    "megatron": _megatron(distributed=False),
    "megatron-distributed": _megatron(distributed=True),
    "megatron-core": _copied("megatron_core_tp2"),
    "dcp": _copied("dcp_fsdp4"),
    "huggingface": _huggingface,
    "torch-weights": _torch_weights,
    "native": _native,
    "universal": _universal,
}


class Outcome(NamedTuple):
    """The result of a mutation."""

    number: int  #: The seed within its format.
    kind: str  #: Kind of the mutation.
    told: str  #: The change that it made.
    #: ``refused``, ``equal``, ``different``, or a violation: ``hang``, ``crash``, ``ran``,
    #: ``touched``, ``read``, ``memory``.
    result: str
    what: str  #: The error, or what differs.


#: Seldom told outside of everstep's own formats: files of other frameworks do not name their rank.
BY_HAND = ("swap", "copy over")
OWN = ("native", "universal")
#: Kinds of mutation that nothing in the files of a format tells, and why.
UNTELLABLE: dict[str, tuple[str, ...]] = {
    # Safetensors have no checksum. The header may be another model's.
    "huggingface": ("flip", "overwrite", "edit header"),
    # A tensor may be a part of its storage. The edited pickle has the right checksum.
    "torch-weights": ("edit pickle",),
    # A manifest with the right seal may leave a tensor of a file out.
    "universal": ("edit json",),
    # Names of parameters were exchanged with other texts.
    "deepspeed-pipeline": ("edit pickle",),
    "deepspeed-zero3-small": ("edit pickle",),
    # Nothing but the group tells a parameter's step count; the edited pickle has its checksum.
    "megatron-core": ("edit pickle",),
}
VIOLATIONS = frozenset(("hang", "crash", "ran", "touched", "read", "memory"))


def campaign(jobs: Sequence[tuple[str, int]]) -> list[tuple[str, Outcome]]:
    """Try mutations, each given by its format and number; a child that hangs is replaced.

    Negative numbers are those that fill memory: -1 the first of ``BOMBS``, and so on in turn.
    """
    found: list[tuple[str, Outcome]] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        while len(found) < len(jobs):
            more = _watched(jobs[len(found) :], Path(tempfile.mkdtemp(dir=folder)))
            found += [(name, Outcome(*outcome)) for name, *outcome in more]
    return found


def _watched(jobs: Sequence[tuple[str, int]], work: Path) -> list[list[Any]]:
    """Run a child until it ends or hangs; return the outcomes, also that of the hang."""
    arguments = [sys.executable, "-m", "tests.support.mutation_campaign", "--child", str(work)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found: list[list[Any]] = []
    begun: list[Any] = []
    with subprocess.Popen(
        arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdin is not None, "it is a pipe"
        assert child.stdout is not None, "it is a pipe"
        child.stdin.write(json.dumps(jobs).encode())
        child.stdin.close()
        while True:
            # Between two mutations a checkpoint may be made, and Python starts before the first.
            patience_s = HANG_S if begun else 10 * HANG_S
            if not select.select([child.stdout], [], [], patience_s)[0]:
                child.kill()
                assert begun, f"after {len(found)} mutations the child hangs by itself"
                return [*found, [*begun, "hang", f"longer than {patience_s} s"]]
            line = child.stdout.readline()
            if not line:
                break
            told = json.loads(line)
            begun = told if len(told) == _BEGUN_FIELDS else []
            if not begun:
                found.append(told)
    if len(found) < len(jobs):
        assert begun, f"after {len(found)} mutations the child ended by itself"
        found.append([*begun, "crash", f"the process ended with {child.returncode}"])
    return found


def child(work: Path) -> None:
    """Convert mutations one after the other; say before and after each what it is."""
    sources: dict[str, tuple[Path, dict[TensorKey, Any]]] = {}
    watch = _Watch()
    for name, number in json.load(sys.stdin):
        if name not in sources:
            original = work / name / "original"
            original.parent.mkdir()
            FORMATS[name](original)
            sources[name] = original, _tensors(_converted(original, work / name / "expected"))
        original, expected = sources[name]
        assert expected, f"{name} holds no tensors"
        place = work / name / str(number)
        source, outside = place / "given" / "source", place / "outside"
        outside.mkdir(parents=True)
        (outside / "secret").write_bytes(b"secret" * 100)
        shutil.copytree(original, source)
        kind = BOMBS[(-1 - number) % len(BOMBS)] if number < 0 else ""
        mutation = mutate(source, random.Random(f"{name}/{number}"), outside, kind)
        _say(json.dumps([name, number, *mutation]))
        outcome = _outcome(source, place / "out", expected, watch)
        if (outside / "ran").exists():
            outcome = "ran", "a payload"
        _say(json.dumps([name, number, *mutation, *outcome]))
        shutil.rmtree(place, ignore_errors=True)


def _outcome(
    source: Path, out: Path, expected: dict[TensorKey, Any], watch: _Watch
) -> tuple[str, str]:
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    try:
        with watch.on(out, source.parents[1] / "outside"):
            made = _converted(source, out)
    except UcpError as error:
        outcome = "refused", f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - anything else is a traceback for a user
        outcome = "crash", f"{type(error).__name__}: {error}"
    else:
        found = _tensors(made)
        names = {*expected, *found}
        wrong = sorted(str(key) for key in names if expected.get(key) != found.get(key))
        outcome = ("different", ", ".join(wrong)) if wrong else ("equal", "")
    outcome = watch.found or outcome
    if outcome[0] == "refused" and (out / "manifest.json").exists():
        return "touched", "a manifest was committed in spite of the error"
    peak = _status("VmHWM") - before
    if peak > MEMORY_BYTES + MEMORY_MORE_BYTES:
        return "memory", f"{peak / MIB:.0f} MiB more"
    return outcome


def _converted(source: Path, out: Path) -> Checkpoint:
    opened = open_source(LocalStore(), str(source), memory_bytes=MEMORY_BYTES)
    result = convert(opened, LocalStore(), str(out), memory_bytes=MEMORY_BYTES, processes=1)
    return result.checkpoint


def _tensors(checkpoint: Checkpoint) -> dict[TensorKey, Any]:
    """Return dtype, shape and bytes of every tensor; tied names are tensors of their own."""
    found: dict[TensorKey, Any] = {}
    for key, entry in checkpoint.state_map.entries.items():
        need = room_for(entry)
        load(checkpoint, [need], threads=1)
        found[key] = (entry.dtype, entry.shape, bytes(need.data))
    for alias, owner in checkpoint.manifest.ties.items():
        found[TensorKey(alias, "weight")] = found.get(TensorKey(owner, "weight"))
    return found


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


_RUNS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "ctypes", "os.fork", "pty")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "shutil")


class _Watch:
    """Audits what this process does while a mutation is converted; hooks cannot be removed."""

    def __init__(self) -> None:
        self.found: tuple[str, str] | None = None
        self._out = self._outside = ""
        sys.addaudithook(self._audit)

    @contextmanager
    def on(self, out: Path, outside: Path) -> Iterator[None]:
        self.found = None
        self._out, self._outside = str(out), str(outside)
        try:
            yield
        finally:
            self._out = ""

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._out:
            return
        if event.startswith(_RUNS):
            self.found = "ran", f"{event} {arguments}"[:200]
        elif event.startswith(_CHANGES) and arguments:
            self._change(event, arguments[0])
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self._change(event, path)
            elif _followed(os.fsdecode(path), flags).startswith(self._outside):
                self.found = "read", os.fsdecode(path)

    def _change(self, event: str, path: Any) -> None:
        real = os.path.realpath(os.fsdecode(path)) if isinstance(path, str | bytes) else str(path)
        # The parent of the destination is made too.
        if real.startswith((self._out, "/proc/", "/dev/null")) or self._out.startswith(real):
            return
        self.found = "touched", f"{event} {real}"


def _followed(path: str, flags: Any) -> str:
    """Return where opening a path leads; the kernel may be told not to follow the last link."""
    if isinstance(flags, int) and flags & os.O_NOFOLLOW:
        folder, name = os.path.split(path)
        return os.path.join(os.path.realpath(folder), name)  # noqa: PTH118 - as they are given
    return os.path.realpath(path)


def _untold(name: str) -> tuple[str, ...]:
    return (*UNTELLABLE.get(name, ()), *(() if name in OWN else BY_HAND))


def assert_sound(found: Sequence[tuple[str, Outcome]]) -> None:
    """Raise if a mutation did harm, or gave other tensors where the files would have told."""
    wrong = [
        (name, *outcome)
        for name, outcome in found
        if outcome.result in VIOLATIONS
        or (outcome.result == "different" and outcome.kind not in _untold(name))
    ]
    assert not wrong, "\n".join(map(str, wrong))


def table(found: Sequence[tuple[str, Outcome]]) -> str:
    """Return a table by format."""
    columns = ("refused", "equal", "different")
    rows = ["| format | mutations | refused | equal | different | violations |", "|---" * 6 + "|"]
    for name in dict.fromkeys(name for name, _ in found):
        counts = Counter(outcome.result for other, outcome in found if other == name)
        wrong = sum(counts[result] for result in VIOLATIONS)
        cells = [counts.total(), *(counts[column] for column in columns), wrong]
        rows.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Print a table, and whatever was neither refused nor equal."""
    if sys.argv[1] == "--child":
        child(Path(sys.argv[2]))
        return
    first, count = int(sys.argv[2]), int(sys.argv[3])
    found: list[tuple[str, Outcome]] = []
    for name in FORMATS if sys.argv[1] == "all" else sys.argv[1].split(","):
        found += campaign([(name, number) for number in range(first, first + count)])
    for name, outcome in found:
        if outcome.result not in {"refused", "equal"}:
            _say(json.dumps([name, *outcome]))
    _say(table(found))


if __name__ == "__main__":
    main()
