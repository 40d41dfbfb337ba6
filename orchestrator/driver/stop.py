"""Stop a run: at the next step boundary, or by force."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from orchestrator.driver.cluster import (
    CONTROLLER_START_S,
    FOLLOW_S,
    ClusterWatch,
    has_controller,
    join_cluster,
    on_head,
    wait,
)
from orchestrator.driver.run import Run
from orchestrator.errors import CapacityError, TokenError
from orchestrator.report import TOKEN
from orchestrator.shell import (
    CONTROLLER,
    RunNames,
    connect_ray,
    kill_local_cluster,
    local_clusters,
    run_id,
    why_silent,
    withdraw,
)

#: Bound for the first answer of a live controller; it took 1 to 50 ms.
ANSWER_S = 3.0
#: Bound for the answer of a task on the head; it took 1 to 3 s.
HEAD_S = 30.0


def stop_run(url: str, reason: str, *, say: Callable[[str], None], token: str = "") -> None:
    """Ask the controller of the run in ``url`` to stop it at the next step boundary.

    ``say`` is called with a line for people before a long wait. Without ``token``, the one in
    ``url`` is used.

    Raises:
        RunNotFoundError: There is no run, or it is over.
        TokenError: The token is wrong, or cannot be read.
        CapacityError: No controller answers, not even the one that Ray would start next.
    """
    run = Run(url)
    contact = run.live_contact()
    token = run.token(token)
    ClusterWatch(run, contact["ray_address"]).await_head(say)
    try:
        connect_ray(contact["ray_address"])
        controller: Any = ray.get_actor(CONTROLLER, namespace=contact["namespace"])
        order: Any = controller.stop.remote(reason, token)
        if not ray.wait([order], timeout=ANSWER_S)[0]:
            ended_s = run.settings().controller_stopped_s
            say(
                "the controller does not answer yet; a stopped controller is restarted after "
                f"{ended_s:g} s, and the request then goes to the new one. Waiting up to "
                f"{ended_s + CONTROLLER_START_S:g} s ..."
            )
            ray.get(order, timeout=ended_s + CONTROLLER_START_S)
        else:
            ray.get(order)
    except TokenError:
        raise _wrong_token(url) from None
    except (ConnectionError, ValueError, RayError, TimeoutError) as error:
        raise CapacityError(
            f"the controller does not answer at {contact['ray_address']}: {error}. If its "
            f"cluster is gone, nothing is training. {run.safe_text()}",
            address=contact["ray_address"],
        ) from error


def await_end(url: str) -> dict[str, Any]:
    """Wait until the run in ``url`` is over and its controller gone; return its summary.

    Call it after ``stop_run``. Raise ``CapacityError`` if the run's cluster is gone.
    """
    run = Run(url)
    contact = run.contact()
    address, directory = contact["ray_address"], run.settings().run.directory

    def is_simulated() -> bool:
        return any(entry.run_directory == directory for entry in local_clusters())

    ends_with_run = is_simulated()
    watch = ClusterWatch(run, address)
    while (summary := run.summary()) is None:
        watch.require()
        time.sleep(FOLLOW_S)
    if ends_with_run:
        # Ray ends a process that calls it while its cluster ends.
        wait(lambda: not is_simulated())
    else:
        wait(
            lambda: (
                bool(why_silent(address, timeout_s=ANSWER_S))
                or not has_controller(address, contact["namespace"])
            )
        )
    return summary


def _wrong_token(url: str) -> TokenError:
    return TokenError(
        f"that is not the token of the run in {url}: leave out --token and EVERSTEP_TOKEN to "
        f"read it from {url}/{TOKEN}, or get it from the person who started the run",
        url=url,
    )


def kill_run(url: str, *, token: str = "") -> None:
    """Kill all processes of the run in ``url``; steps since the last checkpoint are lost.

    Simulated nodes that were started for it end, too.

    Raises:
        RunNotFoundError: There is no run, or it is over.
        TokenError: ``token`` is not the run's, or the run's token cannot be read.
        CapacityError: Its cluster does not answer.
    """
    run = Run(url)
    contact, directory = run.live_contact(), run.settings().run.directory
    # Ray ends processes for any caller, so the right to read the directory decides.
    if token not in ("", run.token()):
        raise _wrong_token(url)
    run.note_killed()
    if kill_local_cluster(directory):
        return
    # Placement groups are only visible in the namespace of the job that started the run.
    join_cluster(
        contact["ray_address"], namespace=contact["namespace"], advice=". Nothing is training there"
    )
    names = RunNames(run_id(directory))
    actors = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == names.namespace
    ]
    # Kill the controller first: it would start new workers.
    for name in sorted(actors, key=lambda name: name != CONTROLLER):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=names.namespace), no_restart=True)
    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(names.reservation_prefix):
            with contextlib.suppress(ValueError):
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))
    # Otherwise Prometheus would look for the controller for ever.
    with contextlib.suppress(RayError, GetTimeoutError):
        ray.get(on_head(withdraw, names.run_id), timeout=HEAD_S)
