"""An engine in a process of its own: its owner outlives it, and when it ends all of its memory is given back.

An owner of several shares the machine out among them: before a process loads its model it reports the memory that this
would take, and waits for a grant. The processes are forked from one that has torch in memory already.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.config import DEFAULT, Origin
from localllm.errors import CardFaultError, LocalLLMError
from localllm.runtime import protocol
from localllm.runtime.engine_client import EngineClient
from localllm.runtime.engine_handle import EnginePeer
from localllm.runtime.engine_loader import Opening, engine_config, open_engine
from localllm.runtime.selection import Selection
from localllm.runtime.sockets import listening, runtime_folder

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.runtime.engine_server import ClientConnection, EngineServer
    from localllm.runtime.engine_thread import EngineThread

_LEAVE_S = 5.0  # for which a process that is told to end may go on, before it is killed
# The longest that a token's message waits for the interpreter, where the engine's thread has it; the usual is 5 ms.
_SWITCH_S = 0.0005
_GRANTED = Origin("flag", "the server's share of the memory")


@dataclass(frozen=True)
class Caps:
    """The most bytes that a model may have; None: what its settings say, or what is free."""

    ram: int | None = None
    vram: int | None = None


@dataclass(frozen=True)
class Foreseen:
    """The placement that a model would get with the memory that there is. is_easy: as if it had the machine to
    itself. needs, limits: bytes of each tier. error: why it would not be placed at all."""

    is_easy: bool = False
    needs: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    error: LocalLLMError | None = None


@dataclass(frozen=True)
class LoadObserver:
    """The callbacks of a load. foreseen: is to `grant` memory, or to have the process `foresee` again with other caps;
    None: it loads at once. progress: called with the name of one of `Watcher`'s fields or "warning", and its
    arguments."""

    foreseen: Callable[[Foreseen], None] | None = None
    progress: Callable[[str, tuple[Any, ...]], None] = lambda _kind, _arguments: None


class EngineProcess(EnginePeer):
    """The process of an engine, which the `EngineClient` that connects to it starts."""

    def __init__(self, selection: Selection, opening: Opening, caps: Caps, observer: LoadObserver) -> None:
        self._observer = observer
        self._own, theirs = socket.socketpair()
        self._process = _context().Process(
            target=_be_engine,
            args=(theirs, selection, opening, caps, observer.foreseen is not None),
            name="localllm-engine",
            daemon=True,
        )
        self._process_began = threading.Event()
        self._ending = threading.Lock()
        self._is_released = self._is_stopped = False
        self._theirs: socket.socket | None = theirs

    def stop_load(self) -> None:
        self._is_stopped = True
        self.kill()

    def close(self, timeout_s: float) -> None:
        """Return when the process has ended; it is killed where it takes longer than that."""
        with self._ending:
            if self._process_began.is_set() and not self._is_released:
                self._process.join(timeout_s)
                if self._process.exitcode is None:
                    self._process.kill()
                    self._process.join(timeout_s)
                self._is_released = self._process.exitcode is not None
                if self._is_released:
                    self._process.close()  # else its descriptors stay as long as anybody knows it
        self._forget_socket()

    def connect(self) -> socket.socket:
        """Start the process on the thread that reads: the first one waits a second for torch."""
        assert self._theirs is not None
        # A screen has a stderr without a descriptor, which is passed on.
        with contextlib.redirect_stderr(sys.__stderr__), _signals_of_the_terminal_held():
            self._process.start()
        self.pid = self._process.pid
        self._process_began.set()
        if self._is_stopped:
            self.kill()
        self._theirs.close()
        self._theirs = None
        return self._own

    def kill(self) -> None:
        with self._ending:
            if self._process_began.is_set() and not self._is_released:
                self._process.kill()

    def receive(self, message: protocol.Message) -> None:
        match message["op"]:
            case "foreseen":
                assert self._observer.foreseen is not None
                self._observer.foreseen(protocol.read(Foreseen, message["foreseen"]))
            case "listening":
                self.socket_path = Path(message["path"])
            case "progress":
                self._observer.progress(message["kind"], tuple(message["arguments"]))

    def why_gone(self) -> str:
        self._forget_socket()
        with self._ending:
            is_known = self._process_began.is_set() and not self._is_released
            if is_known:
                self._process.join(1.0)
            code = self._process.exitcode if is_known else None
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = ", as the system does where memory runs out" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{hint}"
        return "its process has ended" if code is None else f"its process has ended with exit code {code}"

    def _forget_socket(self) -> None:
        if self.socket_path is not None:
            with contextlib.suppress(OSError):
                self.socket_path.unlink()


def start_engine(selection: Selection, opening: Opening, caps: Caps, observer: LoadObserver) -> EngineClient:
    """Load a model in a process of its own."""
    return EngineClient(selection.files.directory, EngineProcess(selection, opening, caps, observer))


def grant(client: EngineClient, caps: Caps) -> None:
    """Let a process that has said what it foresees load with so much."""
    client.answer({"op": "load", "caps": protocol.plain(caps)})


def foresee(client: EngineClient, caps: Caps) -> None:
    """Have a process say what it foresees with so much."""
    client.answer({"op": "foresee", "caps": protocol.plain(caps)})


def _context() -> Any:
    """Return the context that processes are made by. Forked from one that has loaded torch, an engine begins in 30 ms,
    not in a second; and torch is in memory once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["localllm.runtime.preloaded"])
    return context


@contextlib.contextmanager
def _signals_of_the_terminal_held() -> Iterator[None]:
    """Hold back SIGINT and SIGHUP from what this thread starts, and all that is forked from that: the owner receives
    them, and ends the process. One that is still starting would die of them with a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which is started with them, and lets them through then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the new process


def _be_engine(sock: socket.socket, selection: Selection, opening: Opening, caps: Caps, asks: bool) -> None:
    """Run until the owner has gone. Requests are the matter of `engine_server`. asks: the owner grants the memory."""
    for name in ("SIGINT", "SIGHUP"):  # of the terminal: the owner receives it, and ends this
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_S)
    with contextlib.suppress(OSError):  # the owner has gone
        try:
            granted = _agree_on_room(sock, selection, opening, caps) if asks else caps
        except LocalLLMError as error:
            sock.sendall(protocol.line({"op": "failed", "error": protocol.plain(error)}))
            granted = None
        if granted is not None:
            _serve(sock, _with_caps(selection, granted), opening)
    sys.stdout.flush()
    os._exit(0)  # nothing waits for what is still being computed


def _agree_on_room(sock: socket.socket, selection: Selection, opening: Opening, caps: Caps) -> Caps | None:
    """Return the memory that is granted; None where the owner has gone. Raises what keeps the model from being read."""
    while True:
        foreseen = _foreseen(
            _with_caps(selection, caps),
            opening,
            lambda text: sock.sendall(protocol.line(_progress("measuring", text))),
        )
        sock.sendall(protocol.line({"op": "foreseen", "foreseen": protocol.plain(foreseen)}))
        data = b""
        while not data.endswith(b"\n"):  # the owner sends one message, and waits then
            more = sock.recv(4096)
            if not more:
                return None
            data += more
        message = protocol.message(data)
        caps = protocol.read(Caps, message["caps"])
        if message["op"] == "load":
            return caps


def _foreseen(selection: Selection, opening: Opening, say: Callable[[str], None]) -> Foreseen:
    from localllm.engine.model_plan import foresee
    from localllm.errors import DoesNotFitError
    from localllm.models.shapes import find_shape

    shape = find_shape(selection.model_name)
    wanted = engine_config(selection.resolved, shape.config, lambda _text: None)
    try:
        plan = foresee(shape, selection.files, wanted, say, opening.job)
    except DoesNotFitError as error:
        return Foreseen(error=error)
    needs = {str(tier): sum(owners.values()) for tier, owners in plan.ledger.items()}
    usual_ctx = plan.shape.default_ctx
    is_easy = plan.is_whole and plan.ctx >= min(selection.settings.ctx or usual_ctx, usual_ctx)
    return Foreseen(is_easy, needs, {str(tier): count for tier, count in plan.limits.items()})


def _with_caps(selection: Selection, caps: Caps) -> Selection:
    """A share of a cap that nobody has typed is one that nobody has typed."""
    origins = selection.resolved.origins
    given = {
        name: (value, _GRANTED if origins[name] == DEFAULT else origins[name])
        for name, value in vars(caps).items()
        if value is not None
    }
    return Selection(selection.files, selection.resolved.overlaid(given))


def _serve(sock: socket.socket, selection: Selection, opening: Opening) -> None:
    """Load the model and serve all clients, until the owner has gone."""
    from localllm.runtime.engine_server import EngineServer
    from localllm.runtime.engine_thread import EngineThread

    owner: Future[ClientConnection] = Future()

    def tell(kind: str, *arguments: object) -> None:
        owner.result().send(_progress(kind, *arguments))

    with contextlib.ExitStack() as stack:
        listener = None
        with contextlib.suppress(LocalLLMError):  # its owner can use it all the same
            path = runtime_folder() / f"engine-{os.getpid()}.sock"
            listener = stack.enter_context(listening(path))  # before other threads make files: it sets the umask
            stack.callback(path.unlink, missing_ok=True)
            sock.sendall(protocol.line({"op": "listening", "path": str(path)}))
        engine = EngineThread(lambda: _load(selection, opening, tell))
        server = EngineServer(engine)
        engine.moved = server.report_move
        if listener is not None:
            server.listen(listener)
        owner.set_result(server.take_owner(sock))
        threading.Thread(target=_watch, args=(engine, server), name="localllm-watch", daemon=True).start()
        server.owner_gone.wait()
        server.close()
        engine.close(_LEAVE_S)


def _watch(engine: EngineThread, server: EngineServer) -> None:
    """End the process where a GPU computes nothing more in it: another one begins anew."""
    if isinstance(failure := engine.wait_ended(), CardFaultError):
        server.end(failure)
        server.owner_gone.set()


def _load(selection: Selection, opening: Opening, tell: Callable[..., None]) -> Engine:
    """tell: receives the name of one of `Watcher`'s fields or "warning", and its arguments."""
    from localllm.engine.loader import Watcher

    watcher = Watcher(*(partial(tell, each.name) for each in fields(Watcher)))
    return open_engine(selection, opening, watcher, partial(tell, "warning"))


def _progress(kind: str, *arguments: object) -> protocol.Message:
    return {"op": "progress", "kind": kind, "arguments": list(arguments)}
