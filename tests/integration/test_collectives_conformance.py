"""Recorded groups return what torch's own groups return: one suite over a table of backends.

Four processes call every collective in every way that scripts, DTensor and FSDP do. A new backend
is one row of ``BACKENDS``. A new way to call a collective is one case in ``collective_cases``.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.support.collective_cases import CASES, Caller, Case
from tests.support.ranks import Place, running, until
from workers import collectives
from workers.collectives.group import RecordedGroup
from workers.telemetry import FINISHED
from workers.telemetry.ring_reader import Record, read_records

NUM_RANKS = 4
#: Far above what any call needs; ends a suite whose ranks have lost each other.
TIMEOUT_S = 60.0
#: Methods of a group that are no collectives.
OTHER_METHODS = {"_end_coalescing", "_start_coalescing", "abort", "getBackendName"} | {
    "set_timeout",
    "shutdown",
}


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The way in which the cases run."""

    name: str  #: As ``collectives.form`` and torch know it.
    device: str  #: Where the tensors are. All ranks share it.
    is_exact: bool  #: Whether two groups sum in the same order.
    #: Cases that torch's own group refuses when other ranks wait already, or that break its later
    #: calls; each with the method that no other case calls.
    lacks: dict[str, str]


BACKENDS = [
    Backend(name="gloo", device="cpu", is_exact=True, lacks={"coalesced_on_device": ""}),
    Backend(
        name="nccl",
        device="cuda",
        is_exact=False,
        lacks={
            "all_gather_coalesced": "allgather_coalesced",
            "recv_from_anybody": "recv_anysource",
        },
    ),
]


class Seen(NamedTuple):
    """The results of one rank in a case, called one way."""

    refused: str  #: Why torch's own group does not do this, as the recorded one says, too.
    wrong: str  #: Other errors.
    recorded: list[str]  #: The operations, in order of their names.


def call_everything(backend: Backend, place: Place) -> tuple[dict[str, list[Seen]], set[str]]:
    """Be one rank; return what it saw of each case, and which methods of the group were called."""
    if backend.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1 / NUM_RANKS)
        collectives.share_device(f"rank{place.rank}", 1 / NUM_RANKS)
    called = note_calls()
    collectives.form(
        **place.formation(1, NUM_RANKS, timeout_s=TIMEOUT_S) | {"backend": backend.name}
    )
    groups = [dist.group.WORLD, dist.new_group(backend=backend.name)]
    seen = {
        name: [see(case, is_async, backend, groups, place) for is_async in case.ways]
        for name, case in CASES.items()
        if name not in backend.lacks
    }
    groups.clear()
    collectives.leave()
    return seen, called


def note_calls() -> set[str]:
    """Return the names of the group's methods that are called from now on."""
    called: set[str] = set()

    def noting(name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return method(*args, **kwargs)

        return call

    for name in collective_methods():
        setattr(RecordedGroup, name, noting(name, getattr(RecordedGroup, name)))
    return called


def collective_methods() -> set[str]:
    """Return which methods of a group torch calls for a collective."""
    both = vars(RecordedGroup).keys() & vars(dist.ProcessGroup).keys()
    return {name for name in both if not name.startswith("__")} - OTHER_METHODS


def see(case: Case, is_async: bool, backend: Backend, groups: list[Any], place: Place) -> Seen:  # noqa: FBT001
    """Run a case on both groups."""
    num_before = len(read_records(place.ring_path))
    results: list[list[torch.Tensor]] = []
    errors: list[str] = []
    for group in groups:
        caller = Caller(group, torch.device(backend.device), is_async=is_async)
        try:
            results.append([tensor.cpu() for tensor in case.run(caller)])
        except Exception as error:  # noqa: BLE001 - shown by the test of the case
            errors.append(f"{type(group).__name__}: {type(error).__name__}: {error}")

    def new() -> list[Record]:
        return list(read_records(place.ring_path)[num_before:])

    if errors:
        is_refused = len(errors) == len(groups) and "does not support" in errors[-1]
        return Seen(errors[-1], "", []) if is_refused else Seen("", "; ".join(errors), [])
    # The host learns from a device a little later.
    until(lambda: all(one.flags == FINISHED for one in new()), "the end of what was called")
    wrong = difference(*results, is_exact=backend.is_exact)
    return Seen("", wrong, sorted(one.op for one in new()))


def difference(ours: list[torch.Tensor], torchs: list[torch.Tensor], *, is_exact: bool) -> str:
    """Return "" if two results are the same."""
    for number, (mine, other) in enumerate(zip(ours, torchs, strict=True)):
        if not (torch.equal(mine, other) if is_exact else torch.allclose(mine, other, atol=1e-5)):
            return f"tensor {number} is {mine}, torch's own group gives {other}"
    return ""


Found = tuple[Backend, list[tuple[dict[str, list[Seen]], set[str]]]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, id=each.name, marks=[pytest.mark.gpu] * (each.device == "cuda"))
        for each in BACKENDS
    ],
)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Found]:
    """The results of all ranks, with the backend."""
    backend: Backend = request.param
    life = functools.partial(call_everything, backend)
    with running(life, NUM_RANKS, tmp_path_factory.mktemp(backend.name)) as ranks:
        yield backend, ranks.results()


def seen_of(found: Found, name: str) -> list[Seen]:
    """Return what each rank saw in each way."""
    backend, ranks = found
    if name in backend.lacks:
        pytest.skip(f"torch's own group with {backend.name} has no such call")
    all_seen = [each for seen, _ in ranks for each in seen[name]]
    if all(each.refused for each in all_seen):
        pytest.skip(f"torch's own group refuses it, too: {all_seen[0].refused}")
    return all_seen


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_torchs_own_group(found: Found, name: str) -> None:
    """To the bit with gloo: reduce-scatter is built from other calls, and a changed order of sums
    shows."""
    assert {each.wrong for each in seen_of(found, name)} == {""}


@pytest.mark.parametrize("name", CASES)
def test_each_call_is_recorded_once(found: Found, name: str) -> None:
    """torch renames methods; one that is passed by is neither recorded nor woken by an abort."""
    on_host = found[0].device == "cpu"
    expected = CASES[name].records if on_host else CASES[name].records_on_device

    for each in seen_of(found, name):
        assert each.recorded == sorted(expected)


def test_every_method_of_a_group_is_called_by_a_case(found: Found) -> None:
    """Else a method that torch renamed is right by its name alone."""
    backend, ranks = found
    for _, called in ranks:
        assert collective_methods() <= called | set(backend.lacks.values())
