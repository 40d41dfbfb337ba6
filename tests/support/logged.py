"""Read back what loggers wrote to files."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from tests.support.snapshots import eventually


def in_tensorboard(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(one.step, round(one.value, 3)) for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def in_wandb(directory: Path, last_step: int) -> tuple[set[str], list[tuple[int, float]]]:
    """Return the names of the runs that lie there for ``wandb sync``, and their curve.

    It waits for the last step: wandb's own process writes it after it said that all is done.
    """
    eventually(
        lambda: [last_step] == [step for step, _ in _in_wandb(directory)[1][-1:]], within_s=20
    )
    return _in_wandb(directory)


def _in_wandb(directory: Path) -> tuple[set[str], list[tuple[int, float]]]:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    names: set[str] = set()
    rows: list[tuple[int, float]] = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        names.add(path.stem.removeprefix("run-"))
        for data in _records(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("history"):
                items = record.history.item
                values = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}
                rows.append((values["_step"], values["train/loss"]))
    return names, rows


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format: blocks of 32 KiB, parts with headers."""
    at, begun = 7, b""
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
        _, size, kind = struct.unpack_from("<IHB", data, at)
        begun += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # whole, or the last part
            yield begun
            begun = b""
