"""Ray Serve's side of the routing, and all that touches its `RequestRouter`: an alpha API, for which Ray is pinned.

    ingress ─▶ handle.remote(Route(key), ...) ─▶ choose_replicas ─▶ on_request_routed ─▶ on_request_completed
                                                  policy.choose       policy.start         policy.end

Ray makes one router for each handle, in the process that holds the handle: here the ingress. All methods run on one
event loop of their own, so that the policy needs no lock.
"""

import logging
from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .routing import Policy, Route

logger = logging.getLogger(__name__)


class PolicyRouter(RequestRouter):
    """Asks a `Policy`. A request is counted from the moment it is chosen for: others may come before it has arrived."""

    # How long Ray waits for a replica to say how many requests it has, before it goes on to the next one. Its tenth of
    # a second is short where a step holds the interpreter, and the next one has not computed the prompt's beginning.
    queue_len_response_deadline_s = 1.0
    max_queue_len_response_deadline_s = 5.0

    def initialize_state(self, **policy: Any) -> None:
        """Called by Ray with `request_router_kwargs`: the policy's arguments."""
        self._policy = Policy(**policy)
        self._chosen: dict[str, Route] = {}  # of requests that have not come to their replica yet

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one that is chosen, then all others, in case that it cannot be reached."""
        try:
            return self._choose(candidate_replicas, pending_request)
        except Exception:  # Ray would log it, and the request would wait for ever
            logger.exception("The routing failed.")
            return [candidate_replicas]

    def _choose(self, candidates: list[RunningReplica], request: PendingRequest | None) -> list[list[RunningReplica]]:
        if request is None or not candidates:
            return [candidates]
        # Ray does not tell of a request that is cancelled between the choice and the replica.
        for request_id in [request_id for request_id, route in self._chosen.items() if route.has_ended]:
            self._end(request_id)
        replicas = {replica.replica_id.unique_id: replica for replica in candidates}
        self._policy.update([replica_id.unique_id for replica_id in self.curr_replicas])
        route, request_id = _route(request), request.metadata.internal_request_id
        if route.is_request:
            self._policy.end(request_id)  # it may have been chosen for before, in vain
        route.choice = self._policy.choose_for(route, replicas.keys())
        if route.is_request:
            self._policy.start(request_id, route.choice.replica, route.key)
            self._chosen[request_id] = route
        first = replicas.pop(route.choice.replica)
        return [[first], list(replicas.values())] if replicas else [[first]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It has come to a replica, as a rule to the one that was chosen."""
        request_id, route = pending_request.metadata.internal_request_id, _route(pending_request)
        self._chosen.pop(request_id, None)
        if route.is_request and route.choice is not None and route.choice.replica != replica_id.unique_id:
            route.choice = replace(route.choice, replica=replica_id.unique_id, rule="unreachable", num_held=0)
            self._policy.start(request_id, replica_id.unique_id, route.key)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended there, or was sent there in vain."""
        self._end(internal_request_id, replica_id.unique_id)

    def _end(self, request_id: str, replica: str | None = None) -> None:
        self._chosen.pop(request_id, None)
        self._policy.end(request_id, replica)


def _route(request: PendingRequest) -> Route:
    """What the ingress has sent along, as the first argument."""
    first = request.args[0] if request.args else None
    return first if isinstance(first, Route) else Route()
