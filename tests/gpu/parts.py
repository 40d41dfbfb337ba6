"""The parts by name, and how one is performed in this process."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tests.gpu.rows import tell


@dataclass(frozen=True, slots=True)
class Lab:
    """The means of a part."""

    on_cpu: bool  #: Whether stand-ins run, on a machine without a GPU.
    full: bool  #: Whether the whole settings are asked for; by default the smallest ones.
    logs: Path | None  #: Where run directories stay for reading; None to drop them.

    @property
    def device(self) -> str:
        """Return the type of device."""
        return "cpu" if self.on_cpu else "cuda"

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """Yield a folder for what a part writes."""
        if self.logs is not None:
            kept = self.logs.resolve() / name
            kept.mkdir(parents=True, exist_ok=True)
            yield kept
            return
        with tempfile.TemporaryDirectory() as found:
            yield Path(found)


def card(lab: Lab) -> None:
    """Tell what this was seen on."""
    if lab.on_cpu:
        tell("card", "stand-in", f"CPU, torch {torch.__version__}")
        return
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    tell("card", "GPU", f"{name}, {total / 1e9:.0f} GB, {free / 1e9:.0f} GB free")
    tell("card", "versions", f"torch {torch.__version__}, NCCL {nccl}")


def gpu_tests(lab: Lab) -> None:
    """Run every test with the marker gpu."""
    if lab.on_cpu:
        tell("tests", "marker gpu", "skipped: no GPU")
        return
    import pytest

    root = Path(__file__).parents[1]
    marked = [str(path) for path in root.rglob("test_*.py") if "mark.gpu" in path.read_text()]
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    code = pytest.main([*options, *sorted(marked)])
    tell("tests", "marker gpu", f"pytest ends with {int(code)}", "0", ok=code == 0)


def _later(module: str, name: str) -> Callable[[Lab], None]:
    """Return a part whose module is imported when it runs: Ray is not needed by all."""

    def part(lab: Lab) -> None:
        import importlib

        getattr(importlib.import_module(f"tests.gpu.{module}"), name)(lab)

    return part


PARTS: Final[dict[str, Callable[[Lab], None]]] = {
    "card": card,
    "tests": gpu_tests,
    "groups": _later("groups", "groups"),
    "faults": _later("faults", "faults"),
    "equal": _later("runs", "equal"),
    "layouts": _later("runs", "layouts"),
    "diagnosis": _later("runs", "diagnosis"),
    "demo": _later("runs", "demo"),
    "kills": _later("runs", "kills"),
    "snapshot": _later("costs", "snapshot"),
    "pinning": _later("costs", "pinning"),
    "overhead": _later("costs", "overhead"),
    "models": _later("models", "models"),
}


def perform(names: Sequence[str], lab: Lab) -> None:
    """Perform parts one after the other in this process."""
    for name in names:
        begun_s = time.monotonic()
        PARTS[name](lab)
        tell(name, "the part took", f"{time.monotonic() - begun_s:.0f} s")
