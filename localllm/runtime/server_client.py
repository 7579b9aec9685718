"""This user's server, as other programs of the same user find it: what it has loaded, and its engines to attach to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.engine.events import ignore
from localllm.errors import AdapterError, EngineGoneError, LocalLLMError
from localllm.runtime.engine_handle import EnginePeer
from localllm.runtime.engine_loader import Opening, check
from localllm.runtime.sockets import IS_SUPPORTED, connected, found_server, listener_pid
from localllm.version import __version__

if TYPE_CHECKING:
    from localllm.runtime.renewed_client import RenewedClient
    from localllm.runtime.selection import Selection

Progress = Callable[[str, tuple[Any, ...]], None]

_CHOSEN = ("flag", "preset", "environment", "file")
_MENDING = " To fix it: "  # as `server.errors` writes it
_REPLY_S = 30.0  # for what the server answers at once
_AGAIN_S = 0.5  # between two questions whether a model is loaded
_MOST_TRIES = 20  # to reach an engine that the server says it has


class _LocalConnection(HTTPConnection):
    """An HTTP connection to a Unix socket."""

    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Raises OSError where no process listens there."""
        self.sock = connected(self._path)
        self.sock.settimeout(self.timeout)


class ServerRefusedError(LocalLLMError):
    """status: of HTTP. name: the error's, as the server calls it."""

    def __init__(self, status: int, name: str, message: str) -> None:
        told, _, fix = message.partition(_MENDING)
        what, _, why = told.removesuffix(".").partition(": ")
        super().__init__(what, why=why, fix=fix)
        self.code = AdapterError.code if name == "invalid_adapter" else self.code
        self.status = status
        self.name = name


class Server:
    """This user's running server."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def find(cls) -> Server | None:
        """Return the server; None where there is none."""
        path = found_server() if IS_SUPPORTED else None
        return None if path is None else cls(path)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """Return the reply's JSON. Raises OSError where no process listens any more, and ServerRefusedError."""
        connection = _LocalConnection(self._path, timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            value = json.loads(reply.read())
        except (HTTPException, ValueError) as error:
            raise OSError(f"what listens at {self._path} is not a server of localllm: {error}") from None
        finally:
            connection.close()
        if reply.status != 200:
            told = value.get("error", {})
            raise ServerRefusedError(reply.status, str(told.get("code")), str(told.get("message")))
        return value


def named_at_server(word: str) -> str | None:
    """Return the name, or the folder, by which the model is found that the server knows as `word`; None where it knows
    none."""
    server = Server.find()
    try:
        reply = None if server is None else server.ask("POST", "/find", {"model": word}, timeout_s=_REPLY_S)
    except (OSError, ServerRefusedError):
        return None
    return None if reply is None else str(reply["name"])


def attached(selection: Selection, note: Callable[[str], None], progress: Progress = ignore) -> RenewedClient | None:
    """Return a client of the server's engine, which the server loads where it is not loaded. None where there is no
    server, or one whose engine is not as it is wanted, of which `note` is told.

    Where the server has ended since, the next request has the model loaded in a process of this program's.
    progress: as `LoadObserver` has it, of that load.
    """
    if selection.settings.overflow == "grow":  # the server's answers share one context
        return None
    first = _at_server(selection, note)
    if first is None:
        return None
    from localllm.runtime.engine_client import EngineClient
    from localllm.runtime.engine_process import Caps, LoadObserver, start_engine
    from localllm.runtime.renewed_client import RenewedClient

    directory = selection.files.directory

    def again() -> EngineClient:
        there = _at_server(selection, note)
        if there is not None:
            return EngineClient(directory, there)
        note(f"no server answers any more: {selection.files.name} is loaded by this program itself")
        check(selection)
        return start_engine(selection, Opening(keeps_pages=True), Caps(), LoadObserver(progress=progress))

    return RenewedClient(EngineClient(directory, first), again)


def _at_server(selection: Selection, note: Callable[[str], None]) -> ServerEngine | None:
    server = Server.find()
    if server is None:
        return None
    resolved = selection.resolved
    wanted = {
        "version": __version__,
        "model": selection.model_name,
        "directory": str(selection.files.directory.resolve()),
        "settings": {  # the settings of an engine that the user has chosen: the server's engine has to have them
            name: value
            for name, value in asdict(resolved.settings.engine).items()
            if resolved.origins[name].kind in _CHOSEN
        },
        "private": selection.private,
    }
    try:
        server.ask("POST", "/attach", {**wanted, "waits": False}, timeout_s=_REPLY_S)
    except TimeoutError:
        note(f"the running server is not used: it has not answered for {_REPLY_S:.0f} s; this machine may be very busy")
        return None
    except OSError:  # it was killed, and its socket's file stays behind
        return None
    except ServerRefusedError as error:
        if error.status != 404:
            note(f"the running server is not used: {error.why or error.what}")
        return None
    return ServerEngine(server, wanted)


class ServerEngine(EnginePeer):
    """An engine of this user's server."""

    def __init__(self, server: Server, wanted: Mapping[str, Any]) -> None:
        """wanted: the body of `POST /attach`."""
        self._server = server
        self._wanted = wanted

    def connect(self) -> socket.socket:
        """Connect to the engine, when it is loaded. Raises EngineGoneError, and what the server refuses."""
        why = ""
        for _ in range(_MOST_TRIES):
            reply = self._reply()
            try:
                with contextlib.ExitStack() as closing:
                    sock = closing.enter_context(connected(Path(reply["socket"])))
                    self.pid = listener_pid(sock) if sys.platform == "linux" else int(reply["pid"])
                    closing.pop_all()
                    return sock
            except OSError as error:  # the engine has just ended, which the server is about to learn
                why = str(error)
                time.sleep(_AGAIN_S)
        raise EngineGoneError("the server's engine cannot be reached", why=why, fix="localllm stop")

    def _reply(self) -> Any:
        """Return the server's reply, when the engine is loaded."""
        while True:
            try:
                return self._server.ask("POST", "/attach", {**self._wanted, "waits": True})
            except OSError:
                why = "it has ended while it loaded the model"
                raise EngineGoneError("the server cannot be reached", why=why, fix="ask again") from None
            except ServerRefusedError as error:
                if error.name not in ("loading", "overloaded"):
                    raise
                time.sleep(_AGAIN_S)

    def why_gone(self) -> str:
        return "the server has ended, or the process of its engine"

    def kill(self) -> None:
        """Kill the engine's process, as the server does where its own requests wait."""
        if self.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
