"""Replicas on Ray Serve: started, asked, watched, ended.

A Ray of its own is started for them on this machine, and ends with them. Where RAY_ADDRESS names a cluster, they are
placed there, and it stays. What of Ray would be heard or seen elsewhere is off: usage statistics, the dashboard, every
port but on the loopback interface; and nothing speaks to it without a token that is drawn for this run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import psutil
from starlette.types import Message

from localllm.errors import BugError, DoesNotFitError, Fix, LocalLLMError, UsageError
from localllm.runtime import protocol
from localllm.server.errors import busy
from localllm.server.replicas.affinity import ReplicaCall
from localllm.server.replicas.front import ReplicaGoneError
from localllm.server.replicas.replica import BEGINS, ENDS, Replica, Role
from localllm.settings import Settings

ADDRESS_VARIABLE = "RAY_ADDRESS"
PREFIX_ROUTER = "localllm.server.replicas.router:PrefixRouter"
INSTALL = "pip install 'localllm[ray]'"
_DEPLOYMENT = "replica"
# Only what is larger than 100 KB goes through it. The least that Ray takes; in a file of ours, as the shared memory of
# a container has 64 MiB.
_OBJECT_STORE_BYTES = 80 << 20
_USABLE = 0.9  # of the memory that was free before, as an engine by itself takes it
_HEALTH_PERIOD_S = 1.0
_POLL_S = 0.2
_CONNECT_S = 5.0
_GRACE_S = 1.0  # for answers to end where a replica is stopped
_ENDING_S = 10.0  # for Ray to end its processes: two seconds, as a rule
# A replica bounds itself how much it takes on, and says so; Ray's own limit would let clients wait without a word.
_MOST_ONGOING = 100_000
_OWN_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # whatever the system: this node is all of the cluster, on loopback
    "RAY_AUTH_MODE": "token",
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill a replica within its share for the memory of another program
    "RAY_enable_metrics_collection": "0",
}
_EVERY_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # of what it would print: the fleet itself tells of replicas that have died
    "GRPC_VERBOSITY": "NONE",
}


@dataclass(frozen=True)
class Share:
    """A replica's part of its machine. per_node: how many share one. ram_bytes: None: as an engine by itself."""

    per_node: int
    num_cpus: float
    num_gpus: int
    threads: int | None
    ram_bytes: int | None


Node = Mapping[str, float]  # what it has of `CPU`, `GPU` and `memory`, in bytes


def num_gpus_of(nodes: Sequence[Node], settings: Settings) -> int:
    """Return how many GPUs may be used."""
    return 0 if settings.device == "cpu" else sum(int(node.get("GPU", 0)) for node in nodes)


def share_of(nodes: Sequence[Node], num_replicas: int, settings: Settings) -> Share:
    """One GPU each where there are any, else the cores shared out. Raises DoesNotFitError where there are fewer GPUs
    than replicas."""
    num_gpus = num_gpus_of(nodes, settings)
    if 0 < num_gpus < num_replicas:
        why = f"each is given one, and there {'is' if num_gpus == 1 else 'are'} {num_gpus}"
        fix = [Fix.flag("--replicas", num_gpus), Fix.flag("--device", "cpu")]
        raise DoesNotFitError(f"{num_replicas} replicas need {num_replicas} GPUs", why=why, fix=fix)
    most = max(int(node.get("GPU", 0)) for node in nodes) if num_gpus else -(-num_replicas // len(nodes))
    per_node = min(most, num_replicas)
    cores = min(node.get("CPU", 1.0) for node in nodes) / per_node
    ram = settings.ram
    if ram is None and per_node > 1:
        ram = int(_USABLE * min(node["memory"] for node in nodes))
    return Share(
        per_node=per_node,
        num_cpus=int(cores) if cores >= 1 else int(100 * cores) / 100,
        num_gpus=int(num_gpus > 0),
        threads=settings.threads or (max(1, int(cores)) if per_node > 1 else None),
        ram_bytes=None if ram is None else ram // per_node,
    )


def require_ray() -> None:
    """Raises UsageError where the extra is not installed. Imports nothing: Ray reads the environment when it is."""
    if find_spec("ray") is None:
        raise _no_ray("there is no module ray")


def _no_ray(why: str) -> UsageError:
    return UsageError("--ray needs Ray Serve", why=f"it is an extra: {why}", fix=INSTALL)


class Fleet:
    """Copies of one role. It begins to start when it is made; one thread starts, watches and ends all of it, as the
    system ends Ray's processes with the thread that has started them."""

    def __init__(
        self,
        role: Role,
        num_replicas: int | None,
        *,
        most_more: int,
        router: str = PREFIX_ROUTER,
        changed: Callable[[int], None] = lambda _count: None,
    ) -> None:
        """num_replicas: None: one for each GPU, or machine. most_more: as `Affinity` has it. router: the class that Ray
        asks, as MODULE:NAME. changed: hears how many replicas answer, when those are not as many as before."""
        self._num_wanted = num_replicas
        self.num_replicas = 0
        self._role = role
        self._router: dict[str, Any] = {"request_router_class": router}
        if router == PREFIX_ROUTER:
            self._router["request_router_kwargs"] = {"most_more": most_more}
        self._changed = changed
        self._name = f"localllm-{os.getpid()}"
        self._is_own = not os.environ.get(ADDRESS_VARIABLE)
        self._handle: Any = None
        self._failure: BaseException | None = None
        self._settled, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="localllm-ray", daemon=True)
        self._thread.start()

    def wait_started(self) -> bool:
        """Until all replicas answer; False where it was closed before. Raises why they do not."""
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self._handle is not None

    async def ask(self, call: ReplicaCall) -> AsyncGenerator[Message, None]:
        """As `ReplicaFront` wants it."""
        if self._handle is None:
            raise busy("the replicas are being started", "each loads the model", "loading")
        from ray.exceptions import RayError, RayTaskError

        response = self._handle.remote(call)
        try:
            async for message in response:
                yield message
        except RayError as error:
            if isinstance(error, RayTaskError):
                raise
            raise ReplicaGoneError from error
        except BaseException:
            response.cancel()
            raise

    def close(self) -> None:
        """Ends the replicas, and Ray where it is theirs. Where they are still being started, they end with the
        process."""
        self._ending.set()
        self._thread.join(_ENDING_S)

    def _run(self) -> None:
        # Below it Ray makes sockets with names of 83 bytes, and the system takes 107.
        short = gettempdir() if len(os.fsencode(gettempdir())) <= 20 else "/tmp"
        with TemporaryDirectory(prefix="localllm-", dir=short, ignore_cleanup_errors=True) as directory:
            try:
                self._connect(directory)
                if not self._ending.is_set():
                    self._deploy()
            except LocalLLMError as error:
                self._failure = error
            except ImportError as error:
                self._failure = _no_ray(str(error))
            except BaseException as error:
                what = f"Ray did not start the replicas: {type(error).__name__}"
                self._failure = BugError(what, why=str(error)[-600:])
            self._settled.set()
            try:
                self._watch()
            finally:
                self._handle = None
                with contextlib.suppress(Exception):
                    import ray
                    from ray import serve

                    if ray.is_initialized():  # else `serve` would connect
                        if not self._is_own:
                            serve.delete(self._name)
                        ray.shutdown()

    def _watch(self) -> None:
        from ray import serve

        known = self.num_replicas
        while not self._ending.wait(_HEALTH_PERIOD_S / 2) and self._failure is None:
            with contextlib.suppress(Exception):  # Ray's own errors while it handles a replica that has died
                states = serve.status().applications[self._name].deployments[_DEPLOYMENT].replica_states
                if (count := int(states.get("RUNNING", 0))) != known:
                    known = count
                    self._changed(count)

    def _connect(self, directory: str) -> None:
        os.environ.update(_EVERY_RAY if not self._is_own else {**_EVERY_RAY, **_OWN_RAY})
        if self._is_own:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        import ray
        from ray import serve

        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
        if self._is_own:
            usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            ray.init(
                address="local",
                num_cpus=min(psutil.cpu_count(logical=False) or usable, usable),  # each core counted once
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _plasma_directory=directory,
                _temp_dir=directory,
                **quiet,
            )
        else:
            address = os.environ[ADDRESS_VARIABLE]
            _require_listener(address)
            try:
                ray.init(address=address, **quiet)
            except ConnectionError as error:
                raise _no_cluster(address, " ".join(str(error).split())[:300]) from None
        serve.start(proxy_location="Disabled", logging_config=_SERVE_LOG)

    def _deploy(self) -> None:
        import ray
        from ray import serve

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        settings = self._role.resolved.settings
        num_gpus = num_gpus_of(nodes, settings)
        self.num_replicas = self._num_wanted or num_gpus or len(nodes)
        share = share_of(nodes, self.num_replicas, settings)
        settings = replace(settings, threads=share.threads, ram=share.ram_bytes)
        resolved = replace(self._role.resolved, settings=settings)
        role = replace(self._role, resolved=resolved, is_alone=self._is_own)
        deployment = serve.deployment(Replica).options(
            name=_DEPLOYMENT,
            num_replicas=self.num_replicas,
            max_replicas_per_node=share.per_node,
            ray_actor_options={"num_cpus": share.num_cpus, "num_gpus": share.num_gpus},
            max_ongoing_requests=_MOST_ONGOING,
            max_constructor_retry_count=1,
            health_check_period_s=_HEALTH_PERIOD_S,
            graceful_shutdown_timeout_s=_GRACE_S,
            graceful_shutdown_wait_loop_s=_GRACE_S / 10,
            logging_config=_SERVE_LOG,
            request_router_config=self._router,
        )
        target = serve.RunTarget(deployment.bind(role), name=self._name, route_prefix=None)
        [handle] = serve.run_many([target], wait_for_applications_running=False)
        while not self._ending.wait(_POLL_S):
            known = serve.status().applications[self._name]
            if known.status == "RUNNING":
                self._handle = handle.options(stream=True, method_name="answer")
                return
            if known.status == "DEPLOY_FAILED":
                raise _told_by_replica(known.deployments[_DEPLOYMENT].message) or RuntimeError(known.message)


_SERVE_LOG = {"log_level": "ERROR", "enable_access_log": False}


def _require_listener(address: str) -> None:
    """Ray itself tries for two minutes. Raises LocalLLMError."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, why: str) -> LocalLLMError:
    fix = f"unset {ADDRESS_VARIABLE}, for a Ray of its own on this machine"
    return LocalLLMError(f"no Ray cluster answers at {address}", why=why, fix=fix)


def _told_by_replica(text: str) -> LocalLLMError | None:
    """Return the error that is in a trace of Ray's."""
    found = re.search(f"{re.escape(BEGINS)}(.*?){re.escape(ENDS)}", text, re.DOTALL)
    return None if found is None else protocol.read(BaseException, json.loads(found[1]))
