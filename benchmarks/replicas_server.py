"""N replicas of the built-in model behind one front: `python -m benchmarks.replicas_server ROUTER N`.

Prints its port, then how many replicas answer each time that this changes, and ends with its stdin. ROUTER: prefix, as
`localllm serve --ray` has it, or turns: who is next.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from localllm.config import load_settings
from localllm.runtime.selection import selected
from localllm.server.guard import Admission
from localllm.server.http_server import bound, serve
from localllm.server.model_server import Capacity
from localllm.server.replicas.fleet import PREFIX_ROUTER, Fleet
from localllm.server.replicas.front import ReplicaFront, create_front
from localllm.server.replicas.replica import Role

ROUTERS = {"prefix": PREFIX_ROUTER, "turns": "benchmarks.replicas_server:Turns"}


class Turns(RequestRouter):  # type: ignore[misc]
    """Replicas that take turns, whatever is asked: what routing by prefixes is compared with."""

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


def emit(number: int) -> None:
    print(number, flush=True)


def main(router: str, num_replicas: int) -> None:
    resolved = load_settings({"private": True})  # pages on the disk would be found by all
    selection = selected(resolved, "tiny")
    role = Role("tiny", selection.resolved, Capacity(), (), "mean", needs_key=False)
    fleet = Fleet(role, num_replicas, most_more=4, router=ROUTERS[router], changed=emit)
    try:
        fleet.wait_started()
        sock, front, stops = bound("127.0.0.1", 0), ReplicaFront(fleet.ask), list[Callable[[], None]]()
        port = int(sock.getsockname()[1])
        app = create_front(front, Admission((port,)))
        thread = threading.Thread(target=serve, args=(app, [sock], stops.append, front.stop), daemon=True)
        thread.start()
        emit(port)
        sys.stdin.read()
        stops[0]()
        thread.join(10)
    finally:
        fleet.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
