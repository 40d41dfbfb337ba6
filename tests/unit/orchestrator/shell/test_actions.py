"""An action becomes an event, or is refused with its reason."""

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.config import load
from orchestrator.core import RunState, step
from orchestrator.core import events as ev
from orchestrator.errors import ActionError
from orchestrator.shell.actions import DRAIN_S, Actions
from orchestrator.shell.capacity import NodeView
from orchestrator.shell.capacity.notices import Notices
from orchestrator.shell.inbox import Inbox

NODE = "aeed281d" * 7
CONFIG = """
run: {directory: runs/a}
workers: {min: 2, max: 4}
train: {steps: 100}
snapshot: {every_steps: SNAPSHOT}
"""


class Person:
    """Asks a run for actions; ``posted`` has the events, ``stopped`` the reasons to stop."""

    def __init__(self, snapshot: int = 1, in_memory: int = 3, workers_min: int = 2) -> None:
        config = load(CONFIG.replace("SNAPSHOT", str(snapshot)), [f"workers.min={workers_min}"])
        rules = config.rules()
        state, _ = step(RunState(), ev.ControllerStarted(at_s=0.0, incarnation=1), rules=rules)
        self.posted: list[ev.Event] = []
        self.stopped: list[str] = []
        inbox = Inbox(at_s=lambda: 7.0, post=self.posted.append)
        self.view = NodeView(node=NODE, raylet_address=("127.0.0.1", 1))
        views = {NODE: self.view}
        nodes = SimpleNamespace(views=views, notices=Notices(views, inbox, NODE), here=NODE)
        snapshots = SimpleNamespace(flush=lambda lineage: ("flush", lineage))
        self.background: list[Any] = []
        parts: Any = SimpleNamespace(
            config=config,
            rules=rules,
            state=state,
            inbox=inbox,
            nodes=nodes,
            snapshots=snapshots,
            protection=SimpleNamespace(redundancy=lambda _state: {"step": in_memory}),
        )
        self._actions = Actions(parts, stop=self.stopped.append, spawn=self.background.append)

    def __call__(self, name: str, **what: Any) -> str:
        return self._actions.perform(name, what)


def test_each_action_is_an_event() -> None:
    """The journal has to say who made a run smaller, or left a node."""
    person = Person()

    person("stop")
    person("stop", step=50)
    person("save")
    person("workers", num=3)
    person("drain", node=NODE)

    assert person.stopped == ["stopped from the page"]
    stop, save, workers, drain, _ = person.posted
    assert stop == ev.StopRequested(
        at_s=7.0, reason="stopped from the page, after step 50", step=50
    )
    assert save == ev.SaveRequested(at_s=7.0)
    assert person.background == [("flush", ())]
    assert workers == ev.WorkersSet(at_s=7.0, num=3)
    assert drain == ev.NodeDraining(
        at_s=7.0, node=NODE, deadline_s=7.0 + DRAIN_S, notice="drained from the page"
    )


def test_fewer_workers_than_protection_needs_have_their_price_said() -> None:
    """A person asks for fewer workers, and not for less safety."""
    person = Person(workers_min=1)

    assert person("workers", num=2) == "The run has at most 2 workers from now on."
    assert person("workers", num=1) == (
        "The run has at most 1 worker from now on. On fewer than 2 nodes snapshots do not survive "
        "1 lost node: a step that is not in storage may be lost."
    )


@pytest.mark.parametrize(
    ("name", "what", "why"),
    [
        ("explode", {}, "there is no action 'explode'"),
        ("stop", {"step": 100}, "not between the current one, 0, and 100"),
        ("stop", {"step": "ten"}, "step must be a whole number, not 'ten'"),
        ("workers", {"num": 1}, "not between workers.min, 2, and workers.max, 4"),
        ("workers", {"num": 9}, "not between workers.min, 2, and workers.max, 4"),
        ("drain", {"node": "0" * 56}, "no living node '00000000'"),
        ("undrain", {"node": NODE}, "is not drained from the page"),
        ("kill", {"node": NODE}, "the controller runs on this node"),
        ("kill", {"worker": "w9"}, "there is no worker 'w9'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    name: str, what: dict[str, Any], why: str
) -> None:
    """A button that does nothing is pressed again."""
    person = Person()

    with pytest.raises(ActionError, match=why):
        person(name, **what)

    assert (person.posted, person.stopped, person.background) == ([], [], [])


def test_without_snapshots_there_is_nothing_to_save() -> None:
    """The answer would be an empty promise."""
    with pytest.raises(ActionError, match="every_steps is 0"):
        Person(snapshot=0)("save")
    with pytest.raises(ActionError, match="no step is complete in memory"):
        Person(in_memory=0)("save")


def test_a_lost_node_is_left_alone() -> None:
    """It may still be on the page for two seconds."""
    person = Person()
    person.view.lost.set()

    with pytest.raises(ActionError, match="no living node"):
        person("drain", node=NODE)


def test_a_drain_is_taken_back_by_an_event() -> None:
    """A person who chose the wrong node had to wait until the run had left it."""
    person = Person()
    person("drain", node=NODE)
    state = person.view.state

    person("undrain", node=NODE)

    assert (state, person.view.state) == ("draining", "alive")
    assert person.posted[-2] == ev.NodeDraining(
        at_s=7.0, node=NODE, deadline_s=float("inf"), notice=""
    )
