"""Find the requests that Ray's autoscaler cannot serve.

Ray gives no reason for a pending placement group: its machine may be on the way, sold out, or of a
type that the cluster lacks. The autoscaler reports both to Ray's head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import _raylet
from ray.core.generated import autoscaler_pb2

#: The head of a cluster must answer within this many seconds.
_ANSWER_S = 5


@dataclass(slots=True)
class AutoscalerWatch:
    """Finds which alternatives of capacity are refused."""

    #: By type of node: the best open alternative when the autoscaler first failed to get one.
    _meant: dict[str, int] = field(default_factory=dict)
    _last_failed_s: int = -1

    def refused(self, asked: Mapping[str, int]) -> dict[int, str]:
        """Return a line for people for each alternative that was refused since the last call.

        ``asked`` has the alternative of each pending group by the group's id, without those already
        refused.
        """
        state = _autoscaling_state()
        found: dict[int, str] = {}
        for request in state.infeasible_gang_resource_requests:
            group = request.details.partition(":")[0]
            if group in asked:
                found[asked[group]] = "the cluster has no type of node for it"
        failed = list(state.failed_instance_requests)
        new = [each for each in failed if each.failed_ts > self._last_failed_s]
        for each in sorted(new, key=lambda each: each.failed_ts):
            # The report names a type of node but no group: assume the best alternative that is not
            # refused yet.
            best = min(asked.values(), default=-1)
            alternative = self._meant.setdefault(each.ray_node_type_name, best)
            if alternative in asked.values():
                said = each.reason.strip().partition("\n")[0][:200]
                what = f"the autoscaler got no node of type {each.ray_node_type_name}"
                found[alternative] = f"{what}: {said}" if said else what
        self._last_failed_s = max((each.failed_ts for each in failed), default=self._last_failed_s)
        return found


def _autoscaling_state() -> Any:
    # Both modules are compiled, without type information.
    raylet: Any = _raylet
    messages: Any = autoscaler_pb2
    client = raylet.GcsClient(ray.get_runtime_context().gcs_address)
    reply = messages.GetClusterStatusReply()
    reply.ParseFromString(client.get_cluster_status(timeout_s=_ANSWER_S))
    return reply.autoscaling_state
