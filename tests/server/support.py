"""A server as it is, in a thread of the test's process, and raw requests to it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from localllm import hub
from localllm.chat.cascade import Bar
from localllm.config import ResolvedSettings, load_settings
from localllm.engine.engine import Engine
from localllm.hub.adapters import locate_adapter
from localllm.runtime.engine_handle import EngineHandle
from localllm.runtime.engine_loader import Opening, open_engine
from localllm.runtime.engine_process import Caps, Foreseen, LoadObserver, start_engine
from localllm.runtime.engine_thread import EngineThread
from localllm.runtime.model_pool import ModelPool
from localllm.runtime.selection import Selection, with_defaults
from localllm.runtime.served_model import ServedModel
from localllm.server.admin_routes import Doors
from localllm.server.admin_routes import endpoints as local_endpoints
from localllm.server.app import create_app, create_router
from localllm.server.cascade import Cascade
from localllm.server.guard import Admission, key_digest
from localllm.server.http_server import bound, serve
from localllm.server.model_server import Capacity, ModelServer
from tests.patience import PATIENCE_S, wait_for

Json = dict[str, Any]
Patch = pytest.MonkeyPatch
Says = Callable[[str], None]
OWL = [{"role": "user", "content": "A tale about an owl, please."}]


def each_once(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which every value of each axis is met, where a product would have them all."""
    values = [list(axis) for axis in axes]
    return [tuple(axis[index % len(axis)] for axis in values) for index in range(max(map(len, values)))]


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    port: int
    server: ModelServer
    log: list[str]
    client: httpx2.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pool(self) -> ModelPool:
        return self.server.pool

    @property
    def served(self) -> ServedModel:
        return self.pool.first

    @property
    def service(self) -> EngineThread:
        assert isinstance(self.served.handle, EngineThread)
        return self.served.handle

    @property
    def engine(self) -> Engine:
        engine = self.served.engine()
        assert isinstance(engine, Engine)
        return engine

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        return self.client.post(path, json=body, headers=headers)

    def get(self, path: str, **headers: str) -> httpx2.Response:
        return self.client.get(path, headers=headers)

    def answer(self, path: str, body: Any) -> Any:
        """What a request that is honoured gets."""
        reply = self.post(path, body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def error(self, path: str, body: Any, status: int = 400) -> Any:
        """What a request that is refused gets."""
        reply = self.post(path, body)
        assert reply.status_code == status, reply.text
        return reply.json()["error"]

    def stream_lines(self, path: str, body: Any) -> list[str]:
        """The lines of a streamed reply that say something."""
        with self.client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            return [line for line in reply.iter_lines() if line]

    def events(self, path: str, body: Any) -> list[Any]:
        """The data of a stream of events, but for its end mark."""
        lines = self.stream_lines(path, body)
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(each) for each in data if each != "[DONE]"]

    def line_with(self, words: str) -> str:
        """The first line of the log that has them, which may come a moment after the reply."""
        wait_for(lambda: any(words in line for line in self.log))
        return next(line for line in self.log if words in line)

    def wait_until_idle_engine(self) -> None:
        """Until nothing is being computed, whoever still listens."""
        wait_for(lambda: self.is_idle)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being computed; also where no model is loaded."""
        engine = self.served.engine_if_loaded
        return engine is None or engine.status().is_idle

    def wait_until_idle(self) -> None:
        """Until nothing is being computed, and nobody listens."""
        wait_for(lambda: self.is_idle and not self.served.num_open)


def num_cancelled(server: Running) -> float:
    """Answers that nobody waited for."""
    return server.server.metrics.registry.get_sample_value("localllm_answers_total", {"reason": "cancelled"}) or 0


async def begin(pool: ModelPool, begun: threading.Event, settled: threading.Event) -> None:
    """As `localllm serve` does: the server answers while the model is loaded. begun: set when that is on its way.
    settled: when it is loaded, or cannot be."""

    async def load() -> None:
        try:
            await pool.load(pool.first)
        finally:
            settled.set()

    loading = asyncio.ensure_future(load())
    loading.add_done_callback(lambda done: done.cancelled() or done.exception())
    while pool.first.handle is None and not loading.done():
        await asyncio.sleep(0)
    begun.set()


@contextmanager
def running(
    model: str | Path = "tiny",
    *,
    capacity: Capacity | None = None,
    key: str | None = None,
    aliases: Sequence[str] = (),
    load: Callable[[], Engine] | None = None,
    in_processes: bool = False,
    also: Sequence[Path] = (),
    preset: str | None = None,
    adapters: Sequence[Path] = (),
    cascade: Bar | None = None,
    idle_s: float | None = None,
    with_metrics: bool = True,
    send_bytes: int | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """load: how the engine comes to be; None: as `localllm serve` has it, but on a thread of this process unless
    `in_processes`. also: folders of other models. cascade: what answers of the model must pass, where it and those
    answer to the aliases together. send_bytes: that the system keeps of what a client has not taken."""
    capacity = capacity or Capacity()
    resolved: ResolvedSettings = load_settings(settings, environ={})
    selection = with_defaults(resolved, hub.locate(str(model)))
    opening = Opening(parallel=capacity.parallel)
    log: list[str] = []

    def opened(selection: Selection) -> Engine:
        from localllm.engine.loader import Watcher

        return open_engine(selection, opening, Watcher(), lambda _text: None)

    def launch(selection: Selection, caps: Caps, foreseen: Callable[[Foreseen], None]) -> EngineHandle:
        if in_processes:
            return start_engine(selection, opening, caps, LoadObserver(foreseen))
        return EngineThread(load or (lambda: opened(selection)))

    others = [with_defaults(resolved, hub.locate(str(folder))) for folder in also]
    given = [(locate_adapter(str(folder)), 1.0) for folder in adapters]
    named = {"preset": preset, "aliases": aliases, "also": others, "adapters": given}
    pool = ModelPool(selection, resolved, launch, **named, idle_s=idle_s, note=log.append)  # type: ignore[arg-type]
    models = None if cascade is None else Cascade(tuple(aliases), tuple(pool.models), cascade)
    server = ModelServer(pool, capacity, cascade=models)
    sock = bound("127.0.0.1", 0)
    if send_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    port = int(sock.getsockname()[1])
    admission = Admission((port,), key_digest=None if key is None else key_digest(key))
    stops: list[Callable[[], None]] = []
    begun, settled = threading.Event(), threading.Event()
    outer = create_app(server, admission, log=log.append, with_metrics=with_metrics)
    app = Doors(outer, create_router(local_endpoints([], lambda: stops[0]()), server))
    arguments = (app, [sock], stops.append, pool.stop, lambda: begin(pool, begun, settled))
    thread = threading.Thread(target=serve, args=arguments, daemon=True)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        if load is None:
            assert settled.wait(PATIENCE_S)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            yield Running(port, server, log, client)
    finally:
        stops[0]()
        thread.join(PATIENCE_S)
        server.close()


@dataclass
class Raw:
    """A connection on which a test says what it likes. receive_bytes: that the system takes in before it is read."""

    port: int
    receive_bytes: int | None = None
    sock: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self.sock = socket.socket()
        self.sock.settimeout(PATIENCE_S)
        if self.receive_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_bytes)
        self.sock.connect(("127.0.0.1", self.port))

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def post(self, path: str, body: Any, **headers: str) -> None:
        """A whole request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"host": f"127.0.0.1:{self.port}", "content-type": "application/json", "content-length": len(data)}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.send(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)

    def get(self, path: str) -> None:
        self.send(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n\r\n".encode())

    def read_until(self, mark: bytes) -> bytes:
        data = b""
        while mark not in data:
            piece = self.sock.recv(65536)
            if not piece:
                break
            data += piece
        return data

    def status(self) -> int:
        """Of the reply that comes."""
        return int(self.read_until(b"\r\n").split()[1])

    def read_all(self) -> bytes:
        """To the end of the connection."""
        data = b""
        while piece := self.sock.recv(65536):
            data += piece
        return data

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
