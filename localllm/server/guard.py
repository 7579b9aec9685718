"""Admission: by the name that the server was called by, the page that calls, and the key.

A page in a browser reaches loopback addresses too. By a name of its own that resolves to one (DNS rebinding) it would
be of the same origin: the Host header gives it away. From elsewhere it may send what needs no preflight: the Origin
header gives that away.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.chat.text_file import replace_file
from localllm.errors import LocalLLMError, UsageError
from localllm.server.access_log import IGNORED_HEADER
from localllm.server.errors import RequestError
from localllm.server.replies import JsonReply, error_reply
from localllm.server.web_page import WebPage

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:\[\]\s]+)(?::(?P<port>\d{1,5}))?")
_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/?#]*)(?P<path>/[^?#]*)?", re.IGNORECASE)
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
KEY_VARIABLE = "LOCALLLM_API_KEY"
_SHORTEST_KEY = 16  # characters; a made one has 43
_MAKING = "openssl rand -base64 32 > key.txt"
_HTTP_PORT = 80  # of which clients say nothing
_CONTAINERS_HOST = "host.docker.internal"  # as containers call the machine they run on
# What a page of another origin could make of a reply: nothing.
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Admission:
    """The rules of admission.

    ports: those that are listened on
    hosts: names of the server beside its own addresses; one without a port goes with every port, as proxies have others
    is_local: bound to loopback alone
    origins: pages beside those of this machine
    key_digest: SHA-256 of the key; None: none is needed
    """

    ports: tuple[int, ...]
    is_local: bool = True
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    key_digest: bytes | None = None

    def require_host(self, host: str | None) -> None:
        """Raises RequestError."""
        parts = _HOST.fullmatch(host.lower()) if host is not None else None
        if parts is not None and self._is_known(parts[0], parts["name"], int(parts["port"] or _HTTP_PORT)):
            return
        shown = "no Host header" if not host else f"the Host header {host[:200]!r}"
        why = f"{shown} does not name this server"
        fix = f"localllm serve --allow-host {parts[0][:200] if parts else 'NAME'}, if that is a name of this machine"
        raise RequestError(403, "refused", why=why, fix=fix, name="host_not_allowed")

    def _is_known(self, host: str, name: str, port: int) -> bool:
        if not {host, name}.isdisjoint(each.lower() for each in self.hosts):
            return True
        if port not in self.ports:
            return False
        of_machine = (socket.gethostname().lower(), _CONTAINERS_HOST)
        return name in _LOOPBACK_NAMES or (not self.is_local and (name in of_machine or _is_address(name)))

    def allows_origin(self, origin: str) -> bool:
        """Return whether pages of that origin may talk to this server: of this machine, or allowed by name."""
        try:
            parts = urlsplit(origin)
            is_local = parts.scheme in ("http", "https") and parts.hostname in ("localhost", "127.0.0.1", "::1")
        except ValueError:
            is_local = False
        return is_local or origin in self.origins

    def require_origin(self, origin: str | None) -> None:
        """Raises RequestError."""
        if origin is not None and not self.allows_origin(origin):
            why = f"pages from {origin[:200]!r} may not use this server"
            fix = "localllm serve --allow-origin URL, if it is an application of yours"
            raise RequestError(403, "refused", why=why, fix=fix, name="origin_not_allowed")

    def require_key(self, headers: Headers) -> None:
        """Check the key in constant time. Raises RequestError."""
        if self.key_digest is None:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = (headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else "")
        # Clients that know two keys send both. Each is compared whatever the other was.
        are_right = [hmac.compare_digest(key_digest(key), self.key_digest) for key in given]
        if not any(are_right):
            what = "the API key is wrong" if any(given) else "an API key is needed"
            why, fix = "this server was started with one", "send the header Authorization: Bearer KEY"
            asks = {"www-authenticate": "Bearer"}
            raise RequestError(401, what, why=why, fix=fix, name="invalid_api_key", headers=asks)


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_address(name: str) -> bool:
    """Return whether it is an address; a name might have been rebound."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class Guard:
    """Stands in front of the application: only admitted requests reach it. page: the one thing that needs no key."""

    def __init__(self, app: ASGIApp, admission: Admission, page: WebPage) -> None:
        self._app = app
        self._admission = admission
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _use_origin_form(scope)
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        more = dict(SECURITY_HEADERS)
        if origin is not None and self._admission.allows_origin(origin):
            shown = f"x-request-id, retry-after, x-should-retry, x-localllm-evicted-turns, {IGNORED_HEADER}"
            more |= {"access-control-allow-origin": origin, "access-control-expose-headers": shown, "vary": "Origin"}

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = Headers(raw=message["headers"])
                named = {name: value for name, value in more.items() if name not in own}
                raw = [(name.encode("ascii"), value.encode("latin-1")) for name, value in named.items()]
                message["headers"] = [*message["headers"], *raw]
            await send(message)

        app = self._app
        try:
            # A proxy may go by the other one (RFC 9112, 6.1).
            if "transfer-encoding" in headers and "content-length" in headers:
                what, why = "the body has two lengths", "it has a Content-Length and a Transfer-Encoding"
                raise RequestError(400, what, why=why, name="invalid_request", headers={"connection": "close"})
            hosts = headers.getlist("host")
            self._admission.require_host(hosts[0] if len(hosts) == 1 else None)
            if not _is_own_page(headers):
                self._admission.require_origin(origin)
            if scope["method"] == "OPTIONS":
                app = JsonReply({}, 200, {} if origin is None else _preflight(headers))
            elif (file := self._page.reply(scope)) is not None:
                app = file
            else:
                self._admission.require_key(headers)
        except RequestError as error:
            app = error_reply(scope, error)
        await app(scope, receive, with_headers)


def _is_own_page(headers: Headers) -> bool:
    """Return whether the request is of a page that came from the address which the request names, and which is known to
    be this server's. https: behind a proxy with TLS. There browsers tell a page that came without TLS apart by
    Sec-Fetch-Site, which they do not send to http:// addresses of other machines."""
    origin, host = headers.get("origin", ""), headers.get("host", "").lower()
    is_same = headers.get("sec-fetch-site", "same-origin") == "same-origin"
    return is_same and origin in (f"http://{host}", f"https://{host}")


def _use_origin_form(scope: Scope) -> None:
    """Let the address of a request in absolute form, as proxies get it, count instead of the Host header (RFC 9112,
    3.2.2)."""
    parts = _ABSOLUTE.fullmatch(scope.get("raw_path", b""))
    if parts is None:
        return
    scope["raw_path"] = parts["path"] or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("ascii", "replace"))
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", parts["host"]), *others]


def _preflight(headers: Headers) -> dict[str, str]:
    """Return the headers for a page that may talk to the server, which may send any header."""
    return {
        "access-control-allow-methods": "GET, POST, DELETE, HEAD, OPTIONS",
        "access-control-allow-headers": headers.get("access-control-request-headers", ""),
        "access-control-max-age": "600",
    }


@dataclass(frozen=True)
class ServerKey:
    """The API key of a server: given by the user, or made and shown once. Only its digest is saved.

    made: the key itself, if it is new
    """

    digest: bytes
    made: str | None = None


def given_key(file: Path | None, environ: Mapping[str, str]) -> ServerKey | None:
    """Return the key in the file, else in the environment, else None. Raises UsageError."""
    if file is not None:
        try:
            text = file.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {file} cannot be read", why=str(error), fix=_MAKING) from None
        return ServerKey(key_digest(_accepted(text, f"the key in {file}")))
    if environ.get(KEY_VARIABLE):
        return ServerKey(key_digest(_accepted(environ[KEY_VARIABLE], f"the key in {KEY_VARIABLE}")))
    return None


def _accepted(text: str, name: str) -> str:
    key = text.strip()
    if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        why = f"it has {len(key)} characters; at least {_SHORTEST_KEY} are needed, of ASCII and without blanks"
        raise UsageError(f"{name} is not a key", why=why, fix=_MAKING)
    return key


def kept_key(file: Path, *, is_new: bool) -> ServerKey:
    """Return the key of an earlier start, or a new one. Raises LocalLLMError where it cannot be saved."""
    with contextlib.suppress(OSError, ValueError):
        digest = bytes.fromhex(file.read_text(encoding="ascii"))
        if len(digest) == 32 and not is_new:
            return ServerKey(digest)
    key = secrets.token_urlsafe(32)
    digest = key_digest(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, digest.hex())
    except (OSError, UsageError) as error:
        what, fix = f"the key cannot be kept in {file}", "localllm serve --api-key-file FILE"
        why = error.why if isinstance(error, UsageError) else error.strerror or str(error)
        raise LocalLLMError(what, why=why, fix=fix) from None
    return ServerKey(digest, key)
