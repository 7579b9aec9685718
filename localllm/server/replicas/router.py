"""The router that Ray Serve asks which replica comes first. Ray imports it, in the process of the front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from localllm.server.replicas.affinity import Affinity


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """A router by `Affinity`. Ray Serve itself finds out which replicas live, asks the next where one is full, and
    waits where all are."""

    def initialize_state(self, *, most_more: int) -> None:
        self._affinity = Affinity[ReplicaID](most_more)

    def update_replicas(self, replicas: Iterable[RunningReplica]) -> None:
        there = list(replicas)
        super().update_replicas(there)
        self._affinity.keep(each.replica_id for each in there)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._affinity.forget(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        there = {each.replica_id: each for each in candidate_replicas}
        beginning = _beginning(pending_request)
        ranked = self._affinity.ranked(beginning)
        for first in ranked[:1]:  # before it has been sent: others with the same beginning may come at the same moment
            self._affinity.learn(first, beginning)
        return [[there[each]] for each in ranked if each in there]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._affinity.sent(replica_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        self._affinity.learn(replica_id, _beginning(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._affinity.answered(replica_id)


def _beginning(request: PendingRequest | None) -> Sequence[bytes]:
    """Return the beginning of the call, which is a replica's one argument."""
    return () if request is None else request.args[0].beginning
