"""Sockets and connections: the address, how long a client may take, and how the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import operator
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import h11
import psutil
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import Fix, LocalLLMError, UsageError
from localllm.server.errors import RequestError, body_of, failure_of
from localllm.server.guard import SECURITY_HEADERS
from localllm.server.replies import JsonReply, encoded

MAX_HEADER_BYTES = 64 << 10
MAX_CONNECTIONS = 512
_HEADERS_S = 10.0  # for a request's headers to arrive
STALL_S = 600.0  # for which a reader may take nothing: a pager waits for its user, one that has gone for good does not
_GRACE_S = 1  # for answers to be ended when the server is stopped
# The engine's thread waits this long for the interpreter where the loop's is at work. 5 ms is the usual: half a token.
_SWITCH_S = 0.0005


class HttpConnection(H11Protocol):
    """uvicorn's connection, with limits for clients that send nothing or take nothing."""

    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            others = [each for each in self.connections if isinstance(each, HttpConnection) and each is not self]
            kinds = (operator.attrgetter(name) for name in ("is_expected_to_speak", "is_silent", "is_stalled"))
            worst = next((each for is_so in kinds for each in others if is_so(each)), self)
            worst.transport.abort()
            self.connections.discard(worst)  # by itself it goes only after all that came at the same moment
        self._wait_for_headers()

    @property
    def is_silent(self) -> bool:
        """No request is being answered, and no part of a reply is left to be taken."""
        return self._is_answered and not self.transport.get_write_buffer_size()

    @property
    def is_expected_to_speak(self) -> bool:
        """It has sent nothing yet, or half a request."""
        return self._deadline is not None and self.is_silent

    @property
    def is_stalled(self) -> bool:
        """Its reader has taken nothing for a while."""
        return self._stall is not None

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget(stall=True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_answered:
            self._forget(deadline=True)
        elif self._deadline is None:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget(deadline=True, stall=True)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP in our own form, where no reply has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        failure = failure_of(RequestError(400, "the request is not HTTP", why=msg, name="invalid_request"))
        body = encoded(body_of(failure, "openai"))
        head = [*SECURITY_HEADERS.items(), ("content-type", JsonReply.media_type), ("content-length", str(len(body)))]
        headers = [(name.encode(), value.encode()) for name, value in [*head, ("connection", "close")]]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_headers(self) -> None:
        self._deadline = self.loop.call_later(_HEADERS_S, self.transport.close)

    def _forget(self, *, deadline: bool = False, stall: bool = False) -> None:
        if deadline and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if stall and self._stall is not None:
            self._stall.cancel()
            self._stall = None


class Listener(uvicorn.Server):
    """A server that leaves signals to its caller."""

    def __init__(
        self, config: uvicorn.Config, ending: Callable[[], None], beginning: Callable[[], Awaitable[None]] | None
    ) -> None:
        super().__init__(config)
        self._beginning = beginning
        self._ending = ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._beginning is not None:
            await self._beginning()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()  # so that streams end with a word, not with their connection
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UsageError for an address that is none, LocalLLMError where it is taken."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--host {host} is not an address", why=str(error), fix=Fix.flag("--host", "127.0.0.1")
        ) from None
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        if sys.platform != "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            owner, fixes = _owner(port), [Fix.flag("--port", port + 1 if port < 65535 else 8420)]
            if owner.endswith("(localllm)"):
                fixes.append(Fix.command("ps"))
            raise LocalLLMError(f"port {port} is taken", why=f"by {owner}", fix=fixes) from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise LocalLLMError(
                f"port {port} may not be used by this user", why=str(error), fix=Fix.flag("--port", 8420)
            ) from None
        what = f"the server cannot listen on {host}:{port}"
        raise LocalLLMError(what, why=str(error), fix=Fix.flag("--host", "127.0.0.1")) from None
    sock.setblocking(False)
    return sock


def _owner(port: int) -> str:
    """Return the process that listens on it, if it can be known."""
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN and each.pid is not None:
                return f"process {each.pid} ({psutil.Process(each.pid).name()})"
    return "another program"


def is_loopback(sock: socket.socket) -> bool:
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def serve(
    app: ASGIApp,
    sockets: Sequence[socket.socket],
    began: Callable[[Callable[[], None]], Any],
    ending: Callable[[], None],
    beginning: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until stopped.

    began: is given a function that stops it, for any thread or signal handler
    ending: called when it was stopped; ends what is still being answered
    beginning: called on the loop when it listens
    """
    sys.setswitchinterval(_SWITCH_S)
    logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
    logging.getLogger("uvicorn.error").propagate = False
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_GRACE_S,
    )
    listener = Listener(config, ending, beginning)

    def stop() -> None:
        listener.should_exit = True

    began(stop)
    asyncio.run(listener.serve(sockets=list(sockets)))
