"""How often a step makes the host wait for the device, beside a bare loop of FSDP2."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.benchmarks.bare_loop import Loop, kind_of, plain_loop, session_loop
from tests.benchmarks.steps import Job
from tests.unit.workers.train.test_session import Attempts
from workers.models import PRESETS
from workers.protocol import Completed
from workers.train import Session

#: Methods with which Python reads a tensor: on a device the host waits for each of them.
READS: Final = (
    "item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__",
    "__contains__", "is_nonzero", "nonzero", "equal", "allclose",
)  # fmt: skip
#: Operators that do so, for calls from C++.
OPERATORS: Final = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")
STEPS: Final = 3


class Counting(TorchDispatchMode):
    """Counts what makes the host read a tensor, once each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self._is_reading = False
        for name in READS:
            patch.setattr(torch.Tensor, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def read(*args: Any, **kwargs: Any) -> Any:
            if self._is_reading:
                return method(*args, **kwargs)
            self.seen[name] += 1
            self._is_reading = True
            try:
                return method(*args, **kwargs)
            finally:
                self._is_reading = False

        return read

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in OPERATORS and not self._is_reading:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_reads_no_more_from_the_device_than_a_bare_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read makes the host wait, and then the device for the host. The loop reads its loss."""
    seen: dict[str, Counter[str]] = {}

    def compare(session: Session) -> None:
        mesh = session._mesh.sharding
        kind = kind_of("tiny")
        job = Job(
            shape=PRESETS["tiny"], workers=1, global_batch=4, rounds=1, block=1, ways=("bare",)
        )
        ours, steps = session_loop(kind, session, job)
        loops: dict[str, Loop] = {
            "session": ours,
            "bare": plain_loop(kind, mesh, job, alike=False),
        }
        for name, loop in loops.items():
            loop()  # what is done once: the optimizer's state, a comparison of buffers
            with monkeypatch.context() as patch, Counting(patch) as counting:
                for _ in range(STEPS):
                    loop()
            seen[name] = counting.seen
        ours()  # the last step is saved
        assert next(steps, None) is None

    attempts = Attempts(tmp_path, 0, save_every=10 * STEPS)
    try:
        outcome = attempts.train(compare, steps=STEPS + 2)
        assert outcome == Completed(attempt=1, step=STEPS + 2), outcome
    finally:
        attempts.close()

    assert seen["session"]["tolist"] == STEPS, "the counter does not see what a step reads"
    assert seen["session"].total() <= seen["bare"].total(), seen
