"""`localllm serve --ray`: replicas of the server on Ray Serve, behind one address, until Ctrl-C."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localllm.cli.addresses import address_of, tell_addresses
from localllm.cli.context import CliContext
from localllm.cli.options import flag_of
from localllm.errors import Fix, UsageError

if TYPE_CHECKING:
    import socket

    from localllm.runtime.selection import Selection
    from localllm.server.guard import Admission
    from localllm.server.model_server import Capacity
    from localllm.server.replicas.fleet import Fleet


def require_sense(flags: Mapping[str, Any]) -> None:
    """Raises UsageError for flags that replicas cannot honour, and for --ray where there is no Ray."""
    if not flags["ray"]:
        if flags["replicas"] is not None:
            raise UsageError("--replicas needs --ray", why="they are processes of Ray Serve", fix=Fix.flag("--ray"))
        return
    from localllm.server.replicas.fleet import require_ray

    for flag, why in (
        ("also", "each replica has the one model"),
        ("idle_unload", "replicas stay as long as the server runs"),
        ("metrics", "each replica counts for itself; Ray exports what it knows of all"),
    ):
        if flags[flag]:
            typed = flag_of(flag)
            raise UsageError(f"--ray and {typed} cannot go together", why=why, fix=Fix.without(typed))
    require_ray()


def serve_replicas(
    cli: CliContext,
    selection: Selection,
    flags: Mapping[str, Any],
    capacity: Capacity,
    sockets: Sequence[socket.socket],
    admission: Admission,
) -> None:
    """Answers at these sockets, until it is stopped. Raises why the replicas cannot start."""
    from localllm.server.http_server import serve
    from localllm.server.replicas.fleet import Fleet
    from localllm.server.replicas.front import ReplicaFront as Door
    from localllm.server.replicas.front import create_front
    from localllm.server.replicas.replica import Role

    role = Role(
        model=selection.model_name,
        resolved=selection.resolved,
        capacity=capacity,
        aliases=tuple(flags["alias"] or ()),
        pooling=flags["pooling"] or "mean",
        needs_key=admission.key_digest is not None,
    )

    def changed(count: int) -> None:
        lost = "" if count >= fleet.num_replicas else "; Ray starts what is missing"
        cli.output.note(f"{count} of {fleet.num_replicas} replicas answer{lost}")

    with contextlib.ExitStack() as stack:
        line = stack.enter_context(cli.output.progress("starting Ray"))
        line.show(f"starting Ray, and replicas of {selection.files.name} on it ...")
        # Half as many more as one computes at once: what a prefix saves is worth a short wait, not a queue.
        fleet = Fleet(role, flags["replicas"], most_more=max(2, capacity.parallel // 2), changed=changed)
        stack.callback(fleet.close)
        door = Door(fleet.ask)
        log = cli.output.note if not flags["quiet"] else lambda _line: None
        failures: list[BaseException] = []

        def begin(stop: Callable[[], None]) -> None:
            """Wait for the replicas, while the server answers already that they are being started."""

            def wait() -> None:
                try:
                    if fleet.wait_started():
                        _tell(cli, selection, fleet, [address_of(sock) for sock in sockets], line.clear)
                except BaseException as error:
                    failures.append(error)
                    stop()

            threading.Thread(target=wait, name="localllm-waiting", daemon=True).start()
            stack.enter_context(cli.interrupts.stopping(stop))

        serve(create_front(door, admission, log=log), sockets, begin, door.stop)
    if failures:
        raise failures[0]
    cli.output.note("stopped")


def _tell(
    cli: CliContext, selection: Selection, fleet: Fleet, addresses: Sequence[str], clear: Callable[[], None]
) -> None:
    clear()
    many = "1 replica" if fleet.num_replicas == 1 else f"{fleet.num_replicas} replicas"
    cli.output.note(f"serving {selection.files.name} ({many} on Ray Serve) on {' and '.join(addresses)}")
    tell_addresses(cli.output, addresses)
    cli.output.note("run, chat, ps, load and stop do not find this server: its replicas are Ray's processes")
