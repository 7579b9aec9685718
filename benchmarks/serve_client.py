"""The other end of `benchmarks.serve`, in a process of its own: sends streams to a server, and tells when what came.

A line of JSON on stdin is a round: {"port", "path", "bodies"}. Its answer is a line of one list a body: seconds from
the request to each of its pieces.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from typing import Any


def main() -> None:
    for line in sys.stdin:
        wanted = json.loads(line)
        arrivals: list[list[float]] = [[] for _ in wanted["bodies"]]
        threads = [
            threading.Thread(target=listen, args=(wanted["port"], wanted["path"], body, into))
            for body, into in zip(wanted["bodies"], arrivals, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps(arrivals), flush=True)


def listen(port: int, path: str, body: dict[str, Any], arrivals: list[float]) -> None:
    """Adds the seconds to each piece that has text."""
    time.sleep(body.pop("after_s", 0.0))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as sock:
        started = time.perf_counter()
        sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        said = b""
        while b"[DONE]" not in said:
            piece = sock.recv(1 << 16)
            if not piece:
                raise SystemExit(f"the stream ended early: {said[-500:]!r}")
            now = time.perf_counter() - started
            said = said[-16:] + piece
            arrivals.extend([now] * piece.count(b'"finish_reason":null'))


if __name__ == "__main__":
    main()
