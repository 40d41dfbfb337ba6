"""Warm up a process before its worker is ready: imports, a tiny attempt, the script's top level.

The first attempt of a process is slower than later ones: torch imports modules on first use, tokens
are loaded, and caches of kernels and sharding are filled. After the warm-up a standby joins as fast
as a survivor (0.4 s of CPU less, small preset).
"""

import ast
import contextlib
import importlib
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Final

import torch

from ucp_core.storage import MemoryStore
from workers.data import open_texts
from workers.errors import WorkerError
from workers.models import causal_lm
from workers.protocol import Completed, Raised
from workers.settings import DataSettings, ModelSettings, Settings, TrainSettings
from workers.train import attempt_alone, task_of

#: A number that no attempt of a run has.
WARM_UP_ATTEMPT = 0
#: Folders of packages that contain no user's project.
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
#: Enough documents that some are held out.
_NUM_DOCUMENTS: Final = 16


def warm_up(settings: Settings) -> None:
    """Train one step of a tiny model in this process; only warm caches remain.

    The model and its text belong to the warm-up. From the run it takes the settings that select
    other kernels. Raise ``WorkerError`` if it fails, because then this worker cannot train.
    """
    with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
        line = json.dumps({"text": "warm-up " * 8})
        Path(folder, "text.jsonl").write_text(f"{line}\n" * _NUM_DOCUMENTS)
        small = Settings(
            model=ModelSettings(preset="tiny"),
            data=DataSettings(
                source=f"{folder}/*.jsonl",
                sequence_length=16,
                validation_share=0.5,
                cache_directory=folder,
            ),
            train=TrainSettings(
                steps=1,
                global_batch=2,
                precision=settings.train.precision,
                deterministic=settings.train.deterministic,
            ),
        )
        outcome = attempt_alone(small, MemoryStore(), "warm-up", attempt=WARM_UP_ATTEMPT)
    if not isinstance(outcome, Completed):
        detail = outcome.traceback if isinstance(outcome, Raised) else repr(outcome)
        raise WorkerError(f"the warm-up failed, so this worker cannot train: {detail}")


def open_built_in(settings: Settings) -> None:
    """Read the text of the built-in training, and import what its model needs. Never fail.

    Otherwise the whole attempt waits for both. The attempt reports any errors.
    """
    with contextlib.suppress(Exception):
        open_texts(settings.data)
    if settings.model.folder:
        with contextlib.suppress(Exception), torch.device("meta"):
            causal_lm(settings.model.folder)


def import_for(script: str) -> None:
    """Import the installed packages that a script imports at its top level. Never fail.

    Otherwise an attempt waits while a new member runs the script, and Hugging Face's libraries take
    ten seconds of a core to import. The script's own modules are not imported: they may look for a
    GPU, which is not known yet (``run_top_level``).
    """
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        # The attempt reports the error.
        return
    for node in tree.body:
        names = [alias.name for alias in getattr(node, "names", ())]
        modules = names if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        for module in modules:
            with contextlib.suppress(Exception):
                if _is_installed(module.partition(".")[0]):
                    found = importlib.import_module(module)
                    for name in names if isinstance(node, ast.ImportFrom) else ():
                        # Some packages import a name only on first access.
                        getattr(found, name, None)


def run_top_level(settings: Settings) -> bool:
    """Run the script up to its call of ``everstep.run``; return whether it got there.

    Otherwise an attempt waits while a new member reads and prepares its data. This is only for
    processes without a GPU: a script that looks for one would take any, and keep it.
    """
    try:
        task_of(settings)
    except Exception:  # noqa: BLE001  the attempt raises it again, and reports it
        return False
    return True


def _is_installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    parts = Path(found.origin).parts if found is not None and found.origin else ()
    return package == "everstep" or not _INSTALLED.isdisjoint(parts)
