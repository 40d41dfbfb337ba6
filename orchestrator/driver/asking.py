"""Ask a training script for settings that a configuration lacks.

The script runs in a separate process, as a worker runs it, up to its call of ``everstep.run``.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import ConfigError

#: The run asks the script if the configuration lacks one of these.
DECIDED: Final = ("train.steps", "train.global_batch", "train.micro_batch")
#: A script that uses Trainer decides these, too.
_OF_TRAINER: Final = (
    *DECIDED, "train.clip_norm", "train.precision", "train.seed", "data.seed",
    "checkpoint.every_steps", "checkpoint.keep",
)  # fmt: skip
#: A script that contains this name uses Trainer's arguments.
TRAINER: Final = "everstep.integrations.transformers"
#: Settings that only the configuration decides, whatever the script says.
_OURS: Final = frozenset(
    {"run.directory", "run.name", "run.script", "run.arguments", "run.priority"}
)
_CHILD: Final = """
import json, sys
from dataclasses import asdict
from workers.settings import Settings
from workers.train.script import script_settings
to, script, *arguments = sys.argv[1:]
found = [asdict(one) for one in (script_settings(script, arguments), Settings())]
chosen = {
    f"{name}.{key}": value
    for name, section in found[0].items()
    if isinstance(section, dict)
    for key, value in section.items()
    if value != found[1][name][key] or name == "train"
}
with open(to, "w", encoding="utf-8") as file:
    json.dump(chosen, file)
"""
#: How many bytes of a script's output are shown if it fails.
_SHOWN: Final = 2000


def settings_of_script(document: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the settings that the script of a configuration decides, by ``section.key``.

    Empty if the configuration sets all that is needed. ``say`` is called with lines for people.

    Raises:
        ConfigError: The script fails.
    """
    run = _section(document, "run")
    script, arguments = run.get("script"), run.get("arguments") or []
    if not isinstance(script, str) or not Path(script).is_file() or not isinstance(arguments, list):
        return {}
    written = {f"{name}.{key}" for name in document for key in _section(document, name)}
    is_trainers = TRAINER in Path(script).read_text(encoding="utf-8", errors="replace")
    needed = _OF_TRAINER if is_trainers else DECIDED
    if all(key in written for key in needed):
        return {}
    found = {
        key: value
        for key, value in _asked(script, arguments).items()
        if key not in written and key not in _OURS
    }
    workers = _section(document, "workers").get("max")
    if isinstance(workers, int) and "train.micro_batch" in found:
        batch = _section(document, "train").get("global_batch") or found["train.global_batch"]
        found["train.micro_batch"] = _for_all(batch, found["train.micro_batch"], workers)
    told = ", ".join(f"{key}={found[key]}" for key in needed if key in found)
    say(f"{script} decides what the configuration leaves out: {told}")
    return found


def _asked(script: str, arguments: list[Any]) -> dict[str, Any]:
    """Return the script's settings that differ from the defaults, and all of ``train``."""
    with tempfile.TemporaryDirectory(prefix="everstep-") as scratch:
        to = Path(scratch) / "settings.json"
        done = subprocess.run(  # noqa: S603  the user's script
            [sys.executable, "-c", _CHILD, str(to), script, *map(str, arguments)],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode == 0 and to.exists():
            found: dict[str, Any] = json.loads(to.read_text(encoding="utf-8"))
            return found
    said = done.stdout.decode(errors="replace")[-_SHOWN:].strip()
    raise ConfigError(
        f"run.script: {script} was asked for the settings that the configuration leaves out "
        f"({', '.join(DECIDED)}), and failed before its call of everstep.run; set these keys "
        f"if it cannot run on this machine. Its last output:\n{said}",
        problems=[said],
    )


def _for_all(global_batch: Any, micro_batch: int, num_workers: int) -> int:
    """Return the largest divisor of ``micro_batch`` that leaves every worker a micro-batch."""
    if not isinstance(global_batch, int) or global_batch % micro_batch:
        return micro_batch
    sizes = [size for size in range(1, micro_batch + 1) if not micro_batch % size]
    enough = [size for size in sizes if global_batch // size >= num_workers]
    return max(enough, default=micro_batch)


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}
