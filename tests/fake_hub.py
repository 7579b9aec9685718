"""A model hub on 127.0.0.1 that can misbehave: the endpoints that a pull uses, and a storage host that it redirects to.

Every request is recorded with its headers and the body bytes that were written to the socket.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """One answer that goes wrong. `kind` as in `_Handler.answer_wrongly` and, for a file's bytes, `send_body`."""

    kind: str
    amount: int = 0
    text: str = ""


@dataclass
class Record:
    server: str
    method: str
    path: str
    headers: dict[str, str]
    sent_bytes: int = 0

    @property
    def range_start(self) -> int:
        return int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")[0])


@dataclass
class FakeHub:
    """Files by repository; faults by turn (`faults`, one for each file answer) or for every answer (`always`)."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commit: str = COMMIT
    found: list[dict[str, Any]] = field(default_factory=list)  # what a search looks through
    faults: deque[Fault] = field(default_factory=deque)
    always: Fault | None = None
    listing_faults: deque[Fault] = field(default_factory=deque)
    requires_token: str | None = None
    redirect_to: Callable[[str], str] | None = None  # from the address on the storage host
    bare_listing: bool = False  # names only: no sizes, no checksums
    seconds_per_chunk: float = 0.0
    requests: list[Record] = field(default_factory=list)
    endpoint: str = ""
    storage: str = ""
    on_bytes: Callable[[int], None] | None = None  # with the total of body bytes of weights sent

    def reset(self, repositories: dict[str, dict[str, bytes]]) -> None:
        """Forget everything but the addresses."""
        fresh = FakeHub(repositories, endpoint=self.endpoint, storage=self.storage)
        self.__dict__.update(fresh.__dict__)

    def sent_bytes(self, file_name: str) -> int:
        return sum(record.sent_bytes for record in self.requests if record.path.endswith("/" + file_name))

    def file_requests(self, file_name: str, server: str = "storage") -> list[Record]:
        asked = [record for record in self.requests if (record.server, record.method) == (server, "GET")]
        return [record for record in asked if record.path.endswith("/" + file_name)]

    def fault(self) -> Fault:
        return self.faults.popleft() if self.faults else self.always or Fault("none")

    def listing(self, repo: str) -> dict[str, object]:
        siblings: list[dict[str, object]] = []
        for name, data in self.repositories[repo].items():
            item: dict[str, object] = {"rfilename": name}
            if not self.bare_listing:
                item |= {"size": len(data), "blobId": git_sha1(data)}
                if is_large(name):
                    item["lfs"] = {"size": len(data), "sha256": sha256(data), "pointerSize": 134}
            siblings.append(item)
        return {"id": repo, "sha": self.commit, "siblings": siblings}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf", ".pth"))


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A hub and its storage host, on two ports, until the block ends."""
    hub = FakeHub()
    servers = [_server(hub, "hub"), _server(hub, "storage")]
    # Two names of the same machine, so that another host is another host.
    hub.endpoint = f"http://127.0.0.1:{servers[0].server_address[1]}"
    hub.storage = f"http://localhost:{servers[1].server_address[1]}"
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


def _server(hub: FakeHub, name: str) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"hub": hub, "server_name": name})

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that was killed is no news."""

    return Server(("127.0.0.1", 0), handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    server_name: str

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.record = Record(self.server_name, self.command, path, headers)
        self.hub.requests.append(self.record)
        token = self.hub.requires_token
        if self.server_name == "hub" and token and headers.get("authorization") != f"Bearer {token}":
            self.answer(401, b"", {"X-Error-Code": "GatedRepo"})
        elif path == "/api/models":
            self.send_search(parse_qs(urlsplit(self.path).query)["search"][0])
        elif path.startswith("/api/models/"):
            self.send_listing(path)
        else:
            self.route_file(path)

    def send_listing(self, path: str) -> None:
        repo = path.removeprefix("/api/models/").split("/revision/")[0]
        if self.hub.listing_faults:
            self.answer_wrongly(self.hub.listing_faults.popleft(), 0)
        elif repo not in self.hub.repositories:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        else:
            self.answer(200, json.dumps(self.hub.listing(repo)).encode(), {"Content-Type": "application/json"})

    def send_search(self, words: str) -> None:
        found = [item for item in self.hub.found if all(word in item["id"].casefold() for word in words.split())]
        if not (self.hub.listing_faults and self.answer_wrongly(self.hub.listing_faults.popleft(), 0)):
            self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def route_file(self, path: str) -> None:
        repo, _, rest = path.lstrip("/").partition("/resolve/")
        name = rest.partition("/")[2]
        data = self.hub.repositories.get(repo, {}).get(name)
        if data is None:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        etag = f'"{sha256(data) if is_large(name) else git_sha1(data)}"'
        if self.server_name == "hub" and is_large(name):
            location = self.hub.storage + self.path
            location = self.hub.redirect_to(location) if self.hub.redirect_to else location
            linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(data)), "X-Repo-Commit": self.hub.commit}
            self.answer(302, b"", {"Location": location, **linked})
        elif self.command == "HEAD":
            self.answer(200, data, {"ETag": etag})
        else:
            fault = self.hub.fault() if is_large(name) else Fault("none")
            if not self.answer_wrongly(fault, len(data)):
                self.send_body(data, etag, fault)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_wrongly(self, fault: Fault, size: int) -> bool:
        """Send an answer that has nothing of what was asked for, where that is the fault."""
        match fault.kind:
            case "status":
                self.answer(fault.amount, b"", {"Retry-After": fault.text} if fault.text else {})
            case "html":
                self.answer(200, b"<html>log in</html>".ljust(size), {"Content-Type": fault.text or "text/html"})
            case "redirect":
                self.answer(307, b"", {"Location": fault.text})
            case "raw":
                self.answer(200, fault.text.encode(), {"Content-Type": "application/json"})
            case "reset" | "stall":
                time.sleep(fault.amount)
                self.reset()
            case _:
                return False
        return True

    def send_body(self, data: bytes, etag: str, fault: Fault) -> None:
        start = self.record.range_start
        if fault.kind == "flip":
            data = data[: fault.amount] + bytes([data[fault.amount] ^ 1]) + data[fault.amount + 1 :]
        if fault.kind == "other content":
            data, etag = bytes(byte ^ 0xFF for byte in data), '"another"'
        if fault.kind == "gzip":
            data = gzip.compress(data)
        partial = "range" in self.record.headers and fault.kind != "ignore range"
        body = data[start:] if partial else data
        length = len(body) + (fault.amount if fault.kind == "length" else 0)
        self.send_response(206 if partial else 200)
        if partial:
            first = start + (fault.amount if fault.kind == "wrong range" else 0)
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        if fault.kind == "gzip":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("ETag", etag)
        if fault.kind == "longer":
            body += b"x" * fault.amount
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(max(0, length)))
        self.end_headers()
        cut = fault.amount if fault.kind in ("cut", "cut gently") else len(body)
        self.write(body[:cut])
        if fault.kind == "cut" and cut < len(body):
            self.reset()
        elif len(body) != length or cut < len(body):
            self.close_connection = True

    def write(self, body: bytes) -> None:
        # A small buffer, so that what counts as sent is about what was received.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
        view = memoryview(body)
        while view:
            written = self.connection.send(view[: 64 << 10])
            self.record.sent_bytes += written
            view = view[written:]
            if self.hub.on_bytes:
                self.hub.on_bytes(sum(record.sent_bytes for record in self.hub.requests))
            if self.hub.seconds_per_chunk:
                time.sleep(self.hub.seconds_per_chunk)

    def reset(self) -> None:
        """Drops the connection as a crashed peer does: a reset, not a goodbye."""
        self.wfile.flush()
        time.sleep(0.005)
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = True
