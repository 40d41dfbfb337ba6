"""A layout that cannot train is an outcome: another one is taken, or the run says why it ends."""

from dataclasses import replace

import pytest

from orchestrator.core import Bounds, RunRules, describe, resume_event
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import LayoutRules
from tests.support.obedient_cluster import Cluster, Refuses
from ucp_core.layout import ParallelLayout
from workers.protocol import DEVICE_MEMORY

RULES = RunRules(
    run="r",
    min_workers=1,
    max_workers=4,
    total_steps=100,
    layout=LayoutRules(tp=2, pp=2),
    bounds=Bounds(capacity_s=100.0, grace_s=5.0),
)
#: The error of a rank whose device is too small, and what it says of the layout.
TOO_LARGE = ("OutOfMemoryError: CUDA out of memory", DEVICE_MEMORY)


def degree(axis: str, degree: int) -> Refuses:
    """Refuse a degree of an axis."""

    def refuses(layout: ParallelLayout) -> tuple[str, str] | None:
        is_it = getattr(layout, axis) == degree
        why = f"LayoutRefusedError: parallel.{axis}={degree} does not divide 6 layers"
        return (why, axis) if is_it else None

    return refuses


def share(least: int) -> Refuses:
    """Refuse layouts in which a worker holds more than one part in ``least`` of the state."""
    return lambda one: TOO_LARGE if one.tp * one.pp * one.dp_shard < least else None


def test_what_the_user_asked_for_is_refused_at_once_with_the_nearest_layout() -> None:
    """The first attempt says which key is wrong, as a configuration that is checked would."""
    cluster = Cluster(RULES, degree("pp", 2))
    cluster.start(4)

    assert cluster.layouts == ["pp=2 x tp=2"]
    assert cluster.finished is not None
    assert cluster.finished.reason == (
        "pp=2 x tp=2 was refused: parallel.pp=2 does not divide 6 layers; the nearest layout that "
        "was not is dp_shard=2 x tp=2"
    )


@pytest.mark.parametrize(
    ("refuses", "kind", "after"),
    [
        (degree("pp", 2), "layout_refused", "dp_shard=2"),
        (share(4), "device_memory", ""),
    ],
)
def test_a_run_that_has_trained_takes_another_layout_or_waits(
    refuses: Refuses, kind: str, after: str
) -> None:
    """The user did not ask for the layout of two workers: a refusal costs no budget."""
    cluster = Cluster(replace(RULES, layout=LayoutRules(pp=4)))
    cluster.start(4)
    cluster.refuses = refuses
    cluster.lose("n1")

    assert cluster.finished is None
    assert cluster.state.faults == cluster.state.faults[:1], "only the node is charged"
    tries = 1 if after else 2
    assert [each.incident for each in cluster.incidents] == ["node_loss", *[kind] * tries]
    if after:
        assert cluster.layouts == ["pp=4", "pp=2", after]
        assert cluster.started[-1].other_layouts == (
            ("pp=4", "needs 4 workers, and there are 2"),
            ("pp=2", "was refused: parallel.pp=2 does not divide 6 layers"),
        )
    else:
        assert cluster.state.phase == "waiting"
        assert describe(cluster.state)["waits_for"] == (
            "workers for another layout: pp=2 was refused: CUDA out of memory"
        )
        cluster.add(5, 6)
        assert cluster.layouts == ["pp=4", "pp=2", "pp=2", *["dp_shard=3"] * 2, "pp=4"]


def test_a_layout_that_was_refused_is_never_offered_again() -> None:
    """Each refusal rules out what needs as much, however many workers come and go."""
    cluster = Cluster(replace(RULES, max_workers=8, layout=LayoutRules(tp=4)), share(4))
    cluster.start(8)
    for node in ("n3", "n2", "n1"):
        cluster.lose(node)

    refused = [start.layout for start in cluster.started if cluster.refuses(start.layout)]
    assert len(refused) == 2 * len(set(refused)) <= 4
    assert cluster.finished is None


def test_another_layout_is_tried_at_once_however_often_attempts_failed_before() -> None:
    """Seen: a network that had failed for a minute left each layout a pause of 15 s."""
    cluster = Cluster(replace(RULES, layout=LayoutRules(pp=4)))
    cluster.start(4)
    cluster.refuses = lambda _: ("StorageError: step 1 cannot be read", "")
    cluster.lose("n1")
    for _ in range(6):
        cluster.tick(15.0)
    num_before = len(cluster.started)
    cluster.refuses = degree("pp", 2)
    cluster.tick(15.0)

    assert cluster.layouts[num_before:] == ["pp=2", "dp_shard=2"]
    assert cluster.finished is None


def test_a_layout_that_has_trained_is_not_refused_for_memory() -> None:
    """Then a device is short of memory for another reason, and the user's budget is charged."""
    cluster = Cluster(RULES)
    cluster.start(4)
    raised = ev.WorkerRaised(
        at_s=cluster.at_s,
        attempt=1,
        worker="w0001",
        step=2,
        error=TOO_LARGE[0],
        traceback="",
        refuses=TOO_LARGE[1],
    )
    cluster.send(raised)

    assert cluster.layouts == ["pp=2 x tp=2", "pp=2 x tp=2"]
    assert [fault.fault_class for fault in cluster.state.faults] == ["user"]
    assert [(one.incident, one.guilty) for one in cluster.incidents] == [
        ("device_memory", ("w0001",))
    ]


def test_a_model_that_fits_no_device_ends_the_run() -> None:
    """All workers are there: waiting for more would be in vain."""
    cluster = Cluster(RULES, share(100))
    cluster.start(4)

    assert cluster.layouts == ["pp=2 x tp=2"] * 2
    assert cluster.finished is not None
    assert cluster.finished.reason == "pp=2 x tp=2 was refused: CUDA out of memory"


def test_memory_that_lacks_once_refuses_nothing() -> None:
    """Connections of the attempt before are freed by and by: the next one has the room."""
    cluster = Cluster(replace(RULES, layout=LayoutRules(pp=4)))
    cluster.start(4)
    # Every rank says it, in one attempt.
    answers = [TOO_LARGE]
    cluster.refuses = lambda _: answers.pop() if answers else None
    cluster.lose("n1")

    assert cluster.layouts == ["pp=4", "pp=2", "pp=2"]
    assert cluster.state.refused == ()
    assert cluster.state.faults == cluster.state.faults[:1], "only the node is charged"
    assert cluster.incidents[-1].evidence == ("pp=2: CUDA out of memory; it is tried once more")


def test_a_run_that_resumes_with_other_settings_tries_again() -> None:
    """With a smaller micro-batch a layout may fit that did not."""
    cluster = Cluster(replace(RULES, layout=LayoutRules(pp=4)))
    cluster.start(4)
    cluster.refuses = share(4)
    cluster.lose("n1")
    assert [one.layout.pp for one in cluster.state.refused] == [2]

    cluster.send(resume_event(cluster.state, at_s=cluster.at_s, incarnation=2))

    assert (cluster.state.refused, cluster.state.short) == ((), ())


def raises(axis: str, degree: int) -> Refuses:
    """Raise in the first step of a degree that the model's kernels cannot have."""
    error = "RuntimeError: strides should be multiple of 16 bytes"
    return lambda layout: (error, "") if getattr(layout, axis) == degree else None


def test_an_exception_in_the_first_step_of_a_layout_that_the_run_chose_refuses_it() -> None:
    """The user named four workers, which train: the script is not at fault on two."""
    cluster = Cluster(replace(RULES, layout=LayoutRules(tp=2, ep=2)))
    cluster.start(4)
    cluster.refuses = raises("ep", 1)
    cluster.lose("n1")

    assert cluster.layouts == ["dp_shard=2 x tp=2 x ep=2", "tp=2", "dp_shard=2 x ep=2"]
    assert [(one.incident, one.guilty) for one in cluster.incidents][1:] == [("layout_refused", ())]
    assert cluster.finished is None
    assert cluster.state.faults == cluster.state.faults[:1], "only the node is charged"


def test_an_exception_in_a_run_that_has_not_trained_is_the_scripts() -> None:
    """A script with a bug does not wait for workers with which it would fail, too."""
    for size in (2, 4):
        cluster = Cluster(RULES, lambda _: ("NameError: name 'x' is not defined", ""))
        cluster.start(size)

        assert cluster.finished is not None
        assert "NameError" in cluster.finished.reason
        assert len(cluster.started) == 1


def test_an_exception_that_meets_every_layout_is_the_scripts() -> None:
    """The layout that has trained raises as well: then the others are not to blame."""
    cluster = Cluster(replace(RULES, layout=LayoutRules(tp=2)))
    cluster.start(4)
    cluster.refuses = lambda _: ("ValueError: a bad sample", "")
    cluster.lose("n1")
    cluster.add(5, 6)
    cluster.tick(5.0)

    assert cluster.finished is not None
    assert "a bad sample" in cluster.finished.reason


class LosesANode(Cluster):
    """Loses another node once two ranks have raised."""

    def _train(self, start: act.StartAttempt) -> list[ev.Event]:
        events = super()._train(start)
        if isinstance(events[0], ev.WorkerRaised):
            events.insert(2, ev.NodeLost(at_s=self.at_s, node="n1", cause="gone"))
        return events


def test_a_layout_is_refused_also_if_a_node_is_lost_meanwhile() -> None:
    """Seen: the node was the cause, and what all ranks raised was taken for a bug of the script."""
    cluster = LosesANode(replace(RULES, max_workers=6, layout=LayoutRules(tp=2, cp=3)))
    cluster.start(6)
    cluster.refuses = raises("tp", 1)
    cluster.lose("n2")

    assert cluster.layouts == ["cp=3 x tp=2", "cp=3", "tp=2"]
    kinds = [one.incident for one in cluster.incidents]
    assert kinds == ["node_loss", "node_loss", "layout_refused"]
    assert [str(one.layout) for one in cluster.state.refused] == ["cp=3"]
    assert cluster.finished is None


def test_an_error_that_a_layout_which_trained_raised_too_is_the_scripts() -> None:
    """Seen: the only layout for the nodes that were left was refused, and the run waited."""
    error = "ValueError: a bad sample"
    cluster = Cluster(replace(RULES, min_workers=2, layout=LayoutRules(pp=4)))
    cluster.start(4)
    cluster.refuses = lambda _: (error, "")
    raised = ev.WorkerRaised(
        at_s=cluster.at_s, attempt=1, worker="w0001", step=2, error=error, traceback="line 7"
    )
    # A rank raises in a layout that has trained, and a node is lost before the next attempt.
    cluster.send(raised, ev.NodeLost(at_s=cluster.at_s, node="n1", cause="gone"))

    assert cluster.layouts == ["pp=4", "pp=2"]
    assert cluster.state.refused == ()
    assert cluster.finished is not None
    assert cluster.finished.outcome == "failed"
    assert f"raised at step 2: {error}" in cluster.finished.reason


def test_a_run_does_not_refuse_the_only_layout_of_all_its_workers() -> None:
    """Seen: `tp` had trained on one node, two took its place, and the run waited for more."""
    cluster = Cluster(replace(RULES, min_workers=2, max_workers=2, layout=LayoutRules(tp=2)))
    cluster.start(2)
    cluster.refuses = lambda _: ("ValueError: a bad sample", "")
    cluster.lose("n0")
    for number, node in ((3, "n1"), (4, "n2")):
        worker, at_s = f"w{number:04d}", cluster.at_s
        cluster.send(
            ev.ReservationGranted(at_s=at_s, reservation=number, node=node),
            ev.WorkerReady(at_s=at_s, worker=worker, node=node, pid=number),
        )

    assert cluster.layouts == ["tp=2", "dp_shard=2"]
    assert cluster.finished is not None
    assert "a bad sample" in cluster.finished.reason


@pytest.mark.parametrize("kind", ["DataDiffersError", "MisfitError"])
def test_what_all_ranks_met_ends_the_run_at_once_in_its_own_words_and_blames_no_layout(
    kind: str,
) -> None:
    """One rank was heard, and the fence hid the others: it was tried twice and called a bug."""
    cluster = Cluster(replace(RULES, layout=LayoutRules(tp=2)))
    cluster.start(4)
    cluster.refuses = lambda _: (f"{kind}: the data is other data", "")
    cluster.lose("n1")

    assert len(cluster.started) == 2
    assert cluster.finished is not None
    assert cluster.finished.reason == "the data is other data"
    assert [one.guilty for one in cluster.incidents][1:] == [()]
