"""What `benchmarks.replicas` compares prefixes with: replicas that take turns. Imported by Ray."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class Turns(RequestRouter):  # type: ignore[misc]
    """One after the other, whatever is asked."""

    def initialize_state(self) -> None:
        self._num_routed = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002
    ) -> list[list[RunningReplica]]:
        ordered = sorted(candidate_replicas, key=lambda each: str(each.replica_id))
        first = self._num_routed % len(ordered)
        return [[each] for each in ordered[first:] + ordered[:first]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        self._num_routed += 1
